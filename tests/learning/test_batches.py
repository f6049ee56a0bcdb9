"""Batches assembled from receive slots, against loops over rows and columns."""

import numpy as np
import torch

from hpcrl.comm.wire import row_fields, unroll_layout
from hpcrl.learning.batches import assemble, part
from hpcrl.node.staging import Staging
from hpcrl.specs import ActionPart, ActionSpec, ArraySpec, EnvSpec, ObservationLeaf

UNROLL_STEPS, SLOTS, STACK = 5, 6, 3
SPEC = EnvSpec(
    "test",
    {
        "image": ObservationLeaf(ArraySpec((2, 2), "uint8"), stack=STACK),
        "place": ObservationLeaf(ArraySpec((), "int32"), kind="discrete", nvec=(200,)),
    },
    ActionSpec((ActionPart("discrete", (5,)), ActionPart("box", (), (-1.0,), (1.0,)))),
)
BEHAVIOUR = {"log_prob": ArraySpec((), "float32"), "logits": ArraySpec((3,), "float32")}
CPU = torch.device("cpu")


def filled_slots(core_size=4, seed=0):
    rng = np.random.default_rng(seed)
    layout = unroll_layout(SPEC, BEHAVIOUR, UNROLL_STEPS, core_size)
    buffer = layout.buffer(SLOTS)
    views = layout.views(buffer)
    for view in views.values():
        high = 2 if view.dtype == bool else 200
        view[...] = rng.integers(0, high, view.shape).astype(view.dtype)
    return buffer, views


def test_every_field_is_copied_time_first_in_the_order_of_the_slots():
    _, views = filled_slots()
    slots = np.array([4, 0, 5])
    batch = assemble(views, slots, SPEC, BEHAVIOUR)
    for column, slot in enumerate(slots):
        for t in range(UNROLL_STEPS + 1):
            for name in (
                "reward", "terminated", "start", "final", "action", "previous_action",
                "policy_version",
            ):  # fmt: skip
                field = getattr(batch, name)
                np.testing.assert_array_equal(field[t, column].numpy(), views[name][slot, t])
            for name in BEHAVIOUR:
                np.testing.assert_array_equal(
                    batch.behaviour[name][t, column].numpy(), views[f"behaviour:{name}"][slot, t]
                )
            place = batch.observation["place"][t, column]
            assert place == views["obs:place"][slot, t]
        np.testing.assert_array_equal(batch.core_state[column].numpy(), views["core_state"][slot])
    assert batch.terminated.dtype == batch.start.dtype == batch.final.dtype == torch.bool
    assert batch.policy_version.dtype == torch.int64


def test_trap08_stacks_reach_into_the_prefix_and_stop_at_a_start():
    _, views = filled_slots()
    slots = np.array([3, 1])
    batch = assemble(views, slots, SPEC, BEHAVIOUR)
    for column, slot in enumerate(slots):
        frames = [*views["prefix:image"][slot], *views["obs:image"][slot]]
        starts = [False] * (STACK - 1) + views["start"][slot].tolist()
        for t in range(UNROLL_STEPS + 1):
            now = t + STACK - 1
            stack: list[np.ndarray] = []
            hidden = False
            for row in range(now, now - STACK, -1):
                stack.insert(0, np.zeros((2, 2)) if hidden else frames[row])
                hidden |= starts[row]
            np.testing.assert_array_equal(
                batch.observation["image"][t, column].numpy(), np.stack(stack)
            )


def test_a_batch_does_not_change_when_its_slots_are_received_into_again():
    buffer, views = filled_slots()
    batch = assemble(views, np.arange(SLOTS), SPEC, BEHAVIOUR)
    before = [tensor.clone() for tensor in tensors(batch)]
    buffer[:] = 0
    for tensor, copy in zip(tensors(batch), before, strict=True):
        assert torch.equal(tensor, copy)


def tensors(batch):
    rest = batch._asdict()
    return [*rest.pop("observation").values(), *rest.pop("behaviour").values(), *rest.values()]


def test_parts_put_together_are_the_batch():
    _, views = filled_slots()
    batch = assemble(views, np.arange(SLOTS), SPEC, BEHAVIOUR)
    parts = [part(batch, first, last, Staging(CPU)) for first, last in ((0, 1), (1, 4), (4, 6))]
    for whole, *pieces in zip(tensors(batch), *map(tensors, parts), strict=True):
        axis = 0 if whole is batch.core_state else 1
        assert torch.equal(torch.cat(pieces, axis), whole)


def test_networks_without_a_core_have_an_empty_state():
    _, views = filled_slots(core_size=0)
    batch = assemble(views, np.array([2, 0]), SPEC, BEHAVIOUR)
    assert batch.core_state.shape == (2, 0)


def test_every_field_of_a_row_reaches_the_learner():
    """No recorded field is forgotten on the way."""
    _, views = filled_slots()
    batch = assemble(views, np.array([0]), SPEC, BEHAVIOUR)
    reached = {f"obs:{path}" for path in batch.observation}
    reached |= {f"behaviour:{name}" for name in batch.behaviour}
    reached |= {name for name in batch._fields if name not in ("observation", "behaviour")}
    assert reached - {"core_state"} == row_fields(SPEC, BEHAVIOUR).keys()
