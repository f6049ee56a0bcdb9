import json

import pytest

from hpcrl.replay.layout import ReplayLayout
from hpcrl.specs import ArraySpec
from tests.replay.twins import counting_layout, item_steps

GEOMETRIES = [
    {"unroll_length": 5},
    {"unroll_length": 5, "burn_in": 3, "stack": 2},
    {"unroll_length": 4, "burn_in": 3, "stack": 4},
    {"unroll_length": 6, "sequence_length": 3, "items_per_unroll": 6, "stack": 4},
    {"unroll_length": 1, "sequence_length": 3},
    {"unroll_length": 4, "sequence_length": 6, "items_per_unroll": 2, "burn_in": 1},
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_positions_are_steps_relative_to_the_unroll(geometry):
    layout = counting_layout(**geometry)
    for m in range(layout.items_per_unroll):
        first, loss, end = item_steps(layout, k=0, m=m)
        assert layout.first_position[m] == first
        assert layout.loss_start[m] == loss
        assert end - first + 1 == layout.stack_prefix + layout.window
    # The bootstrap row of the last item is the first row of the next unroll.
    assert end == layout.unroll_length


def test_r2d2_in_the_papers_size_needs_one_predecessor():
    layout = counting_layout(unroll_length=80, burn_in=40, stack=4)
    assert layout.window == 121
    assert layout.stack_prefix == 3
    assert layout.num_predecessors == 1
    assert layout.prefix("frame") == layout.prefix("start") == 3
    assert layout.prefix("reward") == 0


def test_a_layout_survives_json():
    layout = counting_layout(unroll_length=8, burn_in=2, items_per_unroll=4, stack=3)
    assert ReplayLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        ({"unroll_length": 0}, "unroll_length 0"),
        ({"unroll_length": 4, "burn_in": 4}, r"burn_in 4 must be in \[0, unroll_length=4\)"),
        ({"unroll_length": 4, "burn_in": -1}, "burn_in -1"),
        ({"unroll_length": 4, "items_per_unroll": 3}, "must divide unroll_length 4"),
        ({"unroll_length": 4, "sequence_length": 2}, "never be trained on"),
        ({"unroll_length": 4, "stack": 0}, "stack 0"),
    ],
)
def test_impossible_geometry_is_refused(geometry, message):
    with pytest.raises(ValueError, match=message):
        counting_layout(**geometry)


def test_stacks_need_their_leaf_and_the_start_flags():
    frame = ArraySpec((2,), "uint8")
    with pytest.raises(ValueError, match="'pixels' is not among the rows"):
        ReplayLayout({"frame": frame}, {}, unroll_length=4, stacks={"pixels": 4})
    with pytest.raises(ValueError, match="need a row leaf 'start'"):
        ReplayLayout({"frame": frame}, {}, unroll_length=4, stacks={"frame": 4})
