import numpy as np
import pytest
import torch

from hpcrl.ops.frame_stack import FrameStacker, stack_frames


class NaiveStack:
    """One environment's stack as a list that is emptied at the start of an episode."""

    def __init__(self, stack, frame_shape):
        self.frames = []
        self.stack, self.frame_shape = stack, frame_shape

    def push(self, frame, start):
        if start:
            self.frames = []
        self.frames.append(frame)
        zeros = [np.zeros(self.frame_shape, frame.dtype)] * self.stack
        return np.stack((zeros + self.frames)[-self.stack :])


def random_steps(num_rows, batch_size, frame_shape, seed, starts=0.3):
    rng = np.random.default_rng(seed)
    frames = rng.integers(1, 256, (num_rows, batch_size, *frame_shape)).astype(np.uint8)
    return frames, rng.random((num_rows, batch_size)) < starts


@pytest.mark.parametrize("stack", [1, 2, 4, 9])
@pytest.mark.parametrize("seed", range(3))
def test_both_equal_a_list_per_environment_over_overlapping_unrolls(stack, seed):
    num_steps, batch_size, frame_shape = 6, 3, (2, 5)
    frames, start = random_steps(4 * num_steps + 1, batch_size, frame_shape, seed)
    naive = [NaiveStack(stack, frame_shape) for _ in range(batch_size)]
    stacker = FrameStacker(batch_size, stack, frame_shape, np.uint8)
    rows = np.arange(batch_size)
    want, prefixes = [], []
    got = np.zeros((batch_size, stack, *frame_shape), np.uint8)
    for frame, first in zip(frames, start, strict=True):
        prefixes.append(np.moveaxis(got[:, 1:], 1, 0))  # all but the oldest of the row before
        got = stacker.push(rows, frame, first)
        want.append(np.stack([n.push(f, s) for n, f, s in zip(naive, frame, first, strict=True)]))
        np.testing.assert_array_equal(got, want[-1])
    for first_row in range(0, len(frames) - 1, num_steps):
        unroll = slice(first_row, first_row + num_steps + 1)
        got = stack_frames(frames[unroll], prefixes[first_row], start[unroll])
        np.testing.assert_array_equal(got, np.stack(want[unroll]))


@pytest.mark.parametrize("stack", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_push_that_was_taken_back_is_as_if_it_had_not_been(stack, seed):
    batch_size, frame_shape = 3, (2,)
    frames, start = random_steps(40, batch_size, frame_shape, seed)
    rng = np.random.default_rng(seed)
    naive = [NaiveStack(stack, frame_shape) for _ in range(batch_size)]
    stacker = FrameStacker(batch_size, stack, frame_shape, np.uint8)
    everyone = np.arange(batch_size)
    for frame, first in zip(frames, start, strict=True):
        got = stacker.push(everyone, frame, first)
        for twin, one, begins in zip(naive, frame, first, strict=True):
            twin.push(one, begins)
        for _ in range(rng.integers(0, 3)):
            rows = np.flatnonzero(rng.random(batch_size) < 0.5)
            stacker.rewind(rows, got[rows, :-1])
            other = rng.integers(1, 256, (len(rows), *frame_shape)).astype(np.uint8)
            again = stacker.push(rows, other, first[rows])
            for row, one, stacked in zip(rows, other, again, strict=True):
                naive[row].frames.pop()
                np.testing.assert_array_equal(stacked, naive[row].push(one, first[row]))
            got[rows] = again


def test_trap08_masks_accumulate_over_several_episode_ends():
    frames = np.arange(1, 7, dtype=np.uint8)[:, None]
    start = np.array([1, 0, 1, 1, 0, 0], bool)[:, None]
    prefix = np.full((3, 1), 99, np.uint8)
    got = stack_frames(frames, prefix, start)[:, 0].tolist()
    assert got == [
        [0, 0, 0, 1],
        [0, 0, 1, 2],
        [0, 0, 0, 3],
        [0, 0, 0, 4],
        [0, 0, 4, 5],
        [0, 4, 5, 6],
    ]


def test_prefix_reaches_over_the_unroll_boundary():
    prefix = np.array([[0], [7], [8]], np.uint8)  # the episode began two rows before row 0
    got = stack_frames(np.array([[9], [10]], np.uint8), prefix, np.zeros((2, 1), bool))
    assert got[:, 0].tolist() == [[0, 7, 8, 9], [7, 8, 9, 10]]


def test_trap08_a_start_hides_older_frames_for_good():
    stacker = FrameStacker(1, 3, (), np.uint8)
    row = np.array([0])
    for frame, start in ((1, True), (2, False), (3, True), (4, False)):
        got = stacker.push(row, np.array([frame], np.uint8), np.array([start]))
    assert got.tolist() == [[0, 3, 4]]


def test_rows_advance_independently_of_each_other():
    stacker = FrameStacker(3, 2, (), np.uint8)
    no = np.array([False])
    stacker.push(np.array([2]), np.array([5], np.uint8), no)
    stacker.push(np.array([0]), np.array([6], np.uint8), no)
    got = stacker.push(np.array([2, 1]), np.array([7, 8], np.uint8), np.array([False, False]))
    assert got.tolist() == [[5, 7], [0, 8]]


def test_returned_arrays_are_not_views_of_the_stacker():
    stacker = FrameStacker(1, 2, (), np.uint8)
    row, no = np.array([0]), np.array([False])
    first = stacker.push(row, np.array([5], np.uint8), no)
    first[:] = 77
    assert stacker.push(row, np.array([6], np.uint8), no).tolist() == [[5, 6]]


def test_torch_tensors_stack_like_numpy_arrays():
    frames, start = random_steps(7, 3, (4, 4), seed=0)
    prefix, _ = random_steps(3, 3, (4, 4), seed=1)
    want = stack_frames(frames, prefix, start)
    got = stack_frames(*map(torch.from_numpy, (frames, prefix, start)))
    assert torch.equal(got, torch.from_numpy(want))


def test_shapes_are_checked():
    frames, start = random_steps(3, 2, (4,), seed=0)
    with pytest.raises(ValueError, match="prefix"):
        stack_frames(frames, frames[:2, :1], start)
    with pytest.raises(ValueError, match="start"):
        stack_frames(frames, frames[:2], start[:-1])
    with pytest.raises(ValueError, match="stack is 0"):
        FrameStacker(1, 0, (), np.uint8)
