"""Observations and actions of any nested space against a naive flattening, element by element."""

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from hypothesis import given, settings
from hypothesis import strategies as st

from env_wrappers.actions import ActionCodec
from env_wrappers.errors import EnvError
from env_wrappers.observations import ObservationCodec
from hpcrl.specs import EnvSpec, unpack_bits

NUM_ENVS = 3

shapes = st.lists(st.integers(1, 3), max_size=3).map(tuple)
box_dtypes = st.sampled_from(
    ["float32", "float64", "float16", "uint8", "int8", "int64", "uint16", "uint64", "bool"]
)


def make_box(shape, dtype):
    high = {"bool": 1, "uint8": 255, "int8": 100}.get(dtype, 1000)
    low = 0 if dtype[0] in "ub" else -high
    return spaces.Box(low, high, shape, np.dtype(dtype))


leaf_spaces = st.one_of(
    st.builds(make_box, shapes, box_dtypes),
    st.builds(spaces.Discrete, st.integers(1, 9), start=st.integers(-5, 5)),
    st.integers(1, 2**16).map(
        lambda seed: spaces.MultiDiscrete(
            np.random.default_rng(seed).integers(1, 9, (2, 1 + seed % 3)),
            start=np.random.default_rng(seed).integers(-5, 5, (2, 1 + seed % 3)),
        )
    ),
    shapes.filter(bool).map(spaces.MultiBinary),
)
any_space = st.recursive(
    leaf_spaces,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(spaces.Dict),
    ),
    max_leaves=5,
)


def samples_of(space, seed, count=NUM_ENVS):
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def batch_of(space, samples):
    """What a gymnasium vector environment gives for these single values."""
    arrays: Any = create_empty_array(space, n=len(samples))
    return concatenate(space, samples, arrays)


def naive_leaves(space, value, prefix=""):
    """(path, leaf space, value with categories from 0), depth first."""
    if isinstance(space, spaces.Dict):
        for key in space.spaces:
            yield from naive_leaves(space[key], value[key], f"{prefix}/{key}")
    elif isinstance(space, spaces.Tuple):
        for index, (inner, part) in enumerate(zip(space.spaces, value, strict=True)):
            yield from naive_leaves(inner, part, f"{prefix}/{index}")
    else:
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            value = value - space.start
        yield prefix.lstrip("/") or "obs", space, np.asarray(value)


@settings(deadline=None, max_examples=150)
@given(space=any_space, seed=st.integers(0, 2**31))
def test_encoded_observations_equal_the_naive_flattening(space, seed):
    samples = samples_of(space, seed)
    codec = ObservationCodec(space)
    batched = codec.encode(batch_of(space, samples), NUM_ENVS)
    by_row = codec.new_arrays(NUM_ENVS)
    for row, sample in enumerate(samples):
        codec.write_row(by_row, row, sample)
        naive = list(naive_leaves(space, sample))
        assert [path for path, _, _ in naive] == list(batched)
        for path, _, value in naive:
            bits = tuple(codec.spec()[path]["bits"])
            seen = unpack_bits(batched[path][row], bits) if bits else batched[path][row]
            np.testing.assert_allclose(seen, value, rtol=1e-6)
            np.testing.assert_array_equal(by_row[path][row], batched[path][row])
    codec.check_bounds(batched)
    for path, leaf in codec.spec().items():
        assert list(batched[path].shape) == [NUM_ENVS, *leaf["array"]["shape"]]
        assert batched[path].dtype == leaf["array"]["dtype"]


@settings(deadline=None, max_examples=150)
@given(space=any_space, seed=st.integers(0, 2**31))
def test_decoded_actions_equal_those_that_were_flattened(space, seed):
    samples = samples_of(space, seed)
    codec = ActionCodec(space, NUM_ENVS)
    flat = [
        np.concatenate([value.ravel() for _, _, value in naive_leaves(space, sample)])
        for sample in samples
    ]
    vectors = np.array(flat).astype(codec.dtype)
    assert vectors.shape == (NUM_ENVS, codec.size)
    for sample, action in zip(samples, codec.decode_rows(vectors), strict=True):
        assert space.contains(action)
        pairs = zip(naive_leaves(space, sample), naive_leaves(space, action), strict=True)
        for (_, _, wanted), (_, _, got) in pairs:
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
            assert got.dtype == wanted.dtype
    batched = naive_leaves(space, codec.decode(vectors))
    of_rows = naive_leaves(space, batch_of(space, codec.decode_rows(vectors)))
    for (_, _, got), (_, _, wanted) in zip(batched, of_rows, strict=True):
        np.testing.assert_array_equal(got, wanted)


@settings(deadline=None, max_examples=50)
@given(observed=any_space, acted=any_space)
def test_spec_survives_json_and_is_what_the_other_ranks_read(observed, acted):
    actions = ActionCodec(acted, 1)
    data = {
        "name": "x:y",
        "observation": ObservationCodec(observed).spec(),
        "action": actions.spec(),
        "frame_skip": 1,
    }
    spec = EnvSpec.from_json(json.loads(json.dumps(data)))
    assert spec.action.size == actions.size
    assert spec.action.dtype == actions.dtype
    for path, arrays in ObservationCodec(observed).new_arrays(1).items():
        assert spec.observation[path].array.shape == arrays.shape[1:]
        assert spec.observation[path].array.dtype == arrays.dtype


def test_paths_kinds_and_categories_of_a_nested_space():
    space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (4, 5), np.uint8),
            "self": spaces.Tuple([spaces.Discrete(3, start=1), spaces.MultiBinary(2)]),
        }
    )
    assert ObservationCodec(space).spec(stack=4) == {
        "camera": {
            "array": {"shape": [4, 5], "dtype": "uint8"},
            "kind": "box",
            "nvec": [],
            "stack": 4,
            "bits": [],
        },
        "self/0": {
            "array": {"shape": [], "dtype": "int32"},
            "kind": "discrete",
            "nvec": [3],
            "stack": 1,
            "bits": [],
        },
        "self/1": {
            "array": {"shape": [2], "dtype": "uint8"},
            "kind": "binary",
            "nvec": [],
            "stack": 4,
            "bits": [],
        },
    }


def test_more_than_eight_flags_travel_as_bits():
    flags = np.array([[1, 0, 0, 0, 0], [0, 0, 1, 1, 1]])  # 10000001 11......
    for space in (spaces.MultiBinary((2, 5)), spaces.Box(0, 1, (2, 5), np.bool_)):
        codec = ObservationCodec(space)
        leaf = codec.spec(stack=2)["obs"]
        assert leaf["array"] == {"shape": [2], "dtype": "uint8"}
        assert leaf["bits"] == [2, 5]
        assert leaf["stack"] == 2
        arrays = codec.new_arrays(2)
        codec.write_row(arrays, 1, flags.astype(space.dtype))
        assert arrays["obs"].tolist() == [[0, 0], [0b10000001, 0b11000000]]
    with pytest.raises(EnvError, match="'obs': expected flags of 0 and 1, got 0 to 2"):
        ObservationCodec(spaces.MultiBinary(9)).encode(
            np.full((1, 9), 2, np.int8) * np.eye(1, 9, dtype=np.int8), 1
        )


def test_box_actions_are_clipped_to_their_bounds():
    codec = ActionCodec(spaces.Box(*np.array([[-1.0, 0.0], [1.0, np.inf]], np.float32)), 1)
    action = codec.decode_rows(np.array([[-7.0, 1e9]], np.float32))[0]
    assert action.tolist() == [-1.0, 1e9]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ([[4.0, 0.0]], "environment 0, component 0: expected a category from 0 to 3, got 4"),
        ([[-1.0, 0.0]], "expected a category from 0 to 3, got -1"),
        ([[0.0, np.nan]], "component 1: expected a number, got nan"),
        ([[0.0]], r"expected shape \(1, 2\), got \(1, 1\)"),
        ([[0.0, 0.0]] * 2, r"expected shape \(1, 2\), got \(2, 2\)"),
    ],
)
def test_impossible_actions_are_refused(action, message):
    space = spaces.Tuple([spaces.Discrete(4), spaces.Box(-1, 1, ())])
    with pytest.raises(EnvError, match=message):
        ActionCodec(space, 1).decode(np.array(action, np.float32))


@pytest.mark.parametrize(
    "inner",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)]),
    ],
)
def test_spaces_without_a_fixed_form_are_named(inner):
    space = spaces.Dict({"a": spaces.Tuple([inner])})
    name = type(inner).__name__
    with pytest.raises(EnvError, match=f"observation space at 'a/0' is a {name}"):
        ObservationCodec(space)
    with pytest.raises(EnvError, match=f"action space is a {name}"):
        ActionCodec(inner, 1)


def test_ambiguous_and_empty_spaces_are_refused():
    twice = spaces.Dict({"a/b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})})
    with pytest.raises(EnvError, match="two leaves of one path"):
        ObservationCodec(twice)
    with pytest.raises(EnvError, match="no leaves"):
        ObservationCodec(spaces.Dict({}))
    with pytest.raises(EnvError, match="no components"):
        ActionCodec(spaces.Tuple([]), 1)
    with pytest.raises(
        EnvError, match="frame_stack is 2, but all observation leaves are categories"
    ):
        ObservationCodec(spaces.Discrete(2)).spec(stack=2)


@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (spaces.Box(0, 1, (2,)), np.zeros(3, np.float32), r"expected shape \(2,\), got \(3,\)"),
        (spaces.Box(0, 255, (2,), np.uint8), np.zeros(2), "expected dtype uint8, got float64"),
        (spaces.Discrete(3, start=2), 5, "'obs': expected categories from 2 to 4, got 5"),
        (spaces.Discrete(3), 1.0, "expected dtype int64, got float64"),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 3]), "expected categories"),
        (spaces.Dict({"a": spaces.Discrete(2)}), {"b": 1}, "'a': missing in an observation"),
        (spaces.Tuple([spaces.Discrete(2)]), (), "'0': missing"),
        (spaces.Tuple([spaces.Discrete(2)]), 3, "'0': missing in an observation of type int"),
    ],
)
def test_observations_that_do_not_match_their_space_are_refused(space, observation, message):
    codec = ObservationCodec(space)
    with pytest.raises(EnvError, match=message):
        codec.write_row(codec.new_arrays(1), 0, observation)


@pytest.mark.parametrize("value", [1.1, -0.1, np.nan])
def test_values_out_of_bounds_are_refused_by_the_full_check(value):
    codec = ObservationCodec(spaces.Dict({"x": spaces.Box(0, 1, (2,))}))
    arrays = codec.new_arrays(1)
    codec.write_row(arrays, 0, {"x": np.array([0.5, value], np.float32)})
    with pytest.raises(EnvError, match=r"leaf 'x': expected values from 0.0 to 1.0, got"):
        codec.check_bounds(arrays)


def test_doubles_at_their_bound_pass_the_full_check_as_floats():
    codec = ObservationCodec(spaces.Box(-0.1, 0.1, (1,), np.float64))
    arrays = codec.encode(np.array([[0.1], [-0.1]]), 2)
    assert arrays["obs"].dtype == np.float32
    codec.check_bounds(arrays)
