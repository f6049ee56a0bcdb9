"""Message layouts: where every field lies, and that two ends which disagree find out."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.comm.wire import (
    Layout,
    Tag,
    command_layout,
    digest,
    reply_layout,
    row_fields,
    stats_layout,
    step_layout,
    step_short_nbytes,
    unroll_layout,
    weights_layout,
    weights_request_layout,
)
from hpcrl.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec, ObservationLeaf

ROOT = Path(__file__).resolve().parent.parent.parent
DTYPES = ["bool", "uint8", "int32", "int64", "float32", "float64"]

shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
specs = st.builds(ArraySpec, shapes, st.sampled_from(DTYPES))
layouts = st.builds(
    Layout,
    st.sampled_from(["step", "reply"]),
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), specs, min_size=1, max_size=6),
)

ENV = EnvSpec(
    "test:env",
    {
        "image": ObservationLeaf(ArraySpec((5, 7), "uint8"), stack=4),
        "speed": ObservationLeaf(ArraySpec((3,), "float32")),
    },
    ActionSpec((ActionPart("discrete", nvec=(4, 2)),)),
    frame_skip=4,
)
BEHAVIOUR = {"logits": ArraySpec((6,), "float32")}


def written_bytes(layout: Layout, name: str) -> list[int]:
    """Indices of the message bytes that belong to a field, found by writing to its view."""
    buffer = layout.buffer()
    layout.views(buffer)[name].view(np.uint8)[...] = 255
    return np.flatnonzero(buffer).tolist()


@given(layouts)
def test_fields_lie_apart_in_order_on_64_byte_boundaries(layout):
    end = 0
    for name, spec in layout.fields.items():
        size = int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize
        start = layout.offsets[name]
        assert start % 64 == 0
        assert end <= start < end + 64
        end = start + size
    assert end <= layout.nbytes < end + 64
    assert layout.nbytes % 64 == 0


@given(layouts)
def test_a_view_writes_to_its_own_bytes_and_no_others(layout):
    for name, spec in layout.fields.items():
        if spec.shape:
            start, size = layout.offsets[name], spec.nbytes
            assert written_bytes(layout, name) == list(range(start, start + size))


@given(layouts, st.lists(st.integers(1, 3), max_size=2))
def test_views_of_many_messages_alias_each_message(layout, leading):
    buffer = layout.buffer(*leading)
    views = layout.views(buffer)
    for index in np.ndindex(*leading):
        single = layout.views(buffer[index])
        for name, spec in layout.fields.items():
            assert views[name].shape == (*leading, *spec.shape)
            assert views[name].dtype == spec.dtype
            views[name][index] = 1
            assert (single[name] == 1).all()


@given(layouts, st.integers(0, 2**32 - 1))
def test_the_other_end_reads_what_was_written(layout, seed):
    random = np.random.default_rng(seed)
    sent, received = layout.buffer(), layout.buffer()
    values = {}
    for name, view in layout.views(sent).items():
        values[name] = random.integers(0, 2, view.shape).astype(view.dtype)
        view[...] = values[name]
    received[:] = np.frombuffer(sent.tobytes(), np.uint8)
    for name, view in layout.views(received).items():
        np.testing.assert_array_equal(view, values[name])


@pytest.mark.parametrize(
    "buffer", [np.zeros(63, np.uint8), np.zeros((2, 65), np.uint8), np.zeros(64, np.int8)]
)
def test_a_buffer_of_another_message_is_refused(buffer):
    layout = Layout("reply", {"x": ArraySpec((), "int64")})
    with pytest.raises(ValueError, match=r"reply: expected uint8 \[\.\.\., 64\]"):
        layout.views(buffer)


def without(fields, name):
    return {n: spec for n, spec in fields.items() if n != name}


@given(layouts, st.data())
def test_the_digest_changes_with_any_change(layout, data):
    fields = dict(layout.fields)
    name = data.draw(st.sampled_from(list(fields)))
    spec = fields[name]
    other_dtype = data.draw(st.sampled_from([d for d in DTYPES if d != spec.dtype]))
    changed = [
        Layout(layout.name + "2", fields),
        Layout(layout.name, {**fields, "new": ArraySpec((), "bool")}),
        Layout(layout.name, {**fields, name: ArraySpec(spec.shape, other_dtype)}),
        Layout(layout.name, {**fields, name: ArraySpec((*spec.shape, 1), spec.dtype)}),
        Layout(layout.name, {"new" if n == name else n: s for n, s in fields.items()}),
        Layout(layout.name, {**without(fields, name), "moved": spec}),
    ]
    if len(fields) > 1:
        changed.append(Layout(layout.name, without(fields, name)))
        changed.append(Layout(layout.name, dict(reversed(fields.items()))))
    assert Layout(layout.name, dict(fields)).digest == layout.digest
    assert layout.digest not in [other.digest for other in changed]
    assert 0 <= layout.digest < 2**63


def test_the_common_digest_covers_every_layout_and_their_order():
    a, b = command_layout(), weights_request_layout()
    values = [digest(), digest(a), digest(b), digest(a, b), digest(b, a), digest(a, b, b)]
    assert len(set(values)) == len(values)
    assert digest(a, b) == digest(command_layout(), weights_request_layout())
    assert all(0 <= value < 2**63 for value in values)


def test_two_processes_agree_on_a_digest():
    code = "from hpcrl.comm.wire import *; print(digest(command_layout(), weights_layout(7)))"
    for hash_seed in ("1", "2"):
        answer = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert int(answer.stdout) == digest(command_layout(), weights_layout(7))


def test_a_step_without_final_observations_is_shorter_by_exactly_them():
    layout = step_layout(ENV, rows=6, timers=2)
    short = step_short_nbytes(ENV, layout)
    for name, spec in layout.fields.items():
        is_final = name.startswith("final:")
        assert (layout.offsets[name] + spec.nbytes <= short) == (not is_final), name
    assert (
        layout.fields["obs:image"] == layout.fields["final:image"] == ArraySpec((6, 5, 7), "uint8")
    )
    assert layout.fields["run_id"].shape == (6,)
    assert layout.fields["timers_s"].shape == (2,)


def test_a_reply_carries_one_action_per_row():
    layout = reply_layout(ENV, rows=6)
    assert layout.fields["action"] == ArraySpec((6, 2), "int32")
    continuous = dataclasses.replace(
        ENV, action=ActionSpec((ActionPart("box", low=(-1.0,), high=(1.0,)),))
    )
    assert reply_layout(continuous, rows=6).fields["action"] == ArraySpec((6, 1), "float32")


def test_an_unroll_has_a_bootstrap_row_and_the_frames_before_row_0():
    layout = unroll_layout(ENV, BEHAVIOUR, unroll_steps=20, core_size=8)
    for name, spec in row_fields(ENV, BEHAVIOUR).items():
        assert layout.fields[name] == ArraySpec((21, *spec.shape), spec.dtype)
    assert layout.fields["prefix:image"] == ArraySpec((3, 5, 7), "uint8")
    assert "prefix:speed" not in layout.fields
    assert layout.fields["core_state"] == ArraySpec((8,), "float32")
    assert layout.fields["behaviour:logits"] == ArraySpec((21, 6), "float32")


def test_frames_are_sent_once():
    # 21 rows and 3 frames before them, instead of 21 stacks of 4.
    layout = unroll_layout(ENV, BEHAVIOUR, unroll_steps=20, core_size=0)
    frames = [s for n, s in layout.fields.items() if n.endswith(":image")]
    assert sum(spec.nbytes for spec in frames) == (21 + 3) * 5 * 7


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(ENV, action=ActionSpec((ActionPart("discrete", nvec=(4, 2, 2)),))),
        dataclasses.replace(ENV, observation={"image": ENV.observation["image"]}),
        dataclasses.replace(ENV, observation=dict(reversed(ENV.observation.items()))),
    ],
    ids=["action", "leaf", "order"],
)
def test_ends_that_disagree_on_the_environment_have_other_digests(other):
    def all_layouts(env):
        return digest(
            step_layout(env, 6, 2), reply_layout(env, 6), unroll_layout(env, BEHAVIOUR, 20, 8)
        )

    assert all_layouts(other) != all_layouts(ENV)


def test_counters_and_episodes_travel_in_one_report():
    layout = stats_layout(("frames", "steps"), episodes=5)
    assert list(layout.fields) == [
        "frames",
        "steps",
        "num_episodes",
        "episode_evaluation",
        "episode_return",
        "episode_steps",
    ]
    assert layout.fields["episode_return"].shape == (5,)
    views = layout.views(layout.buffer())
    views["frames"][...] = 2**53 - 1
    assert int(views["frames"]) == 2**53 - 1


def test_weights_keep_a_version_beside_the_parameters():
    layout = weights_layout(1001)
    views = layout.views(layout.buffer())
    views["version"][...] = 2**40 + 1
    views["parameters"][:] = 3
    assert int(views["version"]) == 2**40 + 1


def test_tags_stay_apart_and_within_what_every_mpi_allows():
    # MPI promises tags up to 32767; steps and replies add a group index to theirs.
    tags = sorted(Tag)
    assert len(set(tags)) == len(Tag)
    assert Tag.REPLY - Tag.STEP > 1000
    assert Tag.REPLY + 1000 <= 32767
    assert all(tag < Tag.STEP for tag in tags if tag not in (Tag.STEP, Tag.REPLY))
