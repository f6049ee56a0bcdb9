"""Every way of resetting gives the same transitions, which are those of the script."""

import functools

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from env_wrappers.errors import EnvError
from env_wrappers.sync import SyncBatch
from env_wrappers.vector import VectorBatch
from tests.env_wrappers.scripted import SCRIPT, ScriptedEnv, ScriptedVectorEnv, reward_of, script_at

NUM_ENVS = 4
EPISODES = 7
MODES = ["SAME_STEP", "NEXT_STEP", "DISABLED"]


def gymnasium_batch(mode):
    makers = [functools.partial(ScriptedEnv, index) for index in range(NUM_ENVS)]
    envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode])
    return VectorBatch("gymnasium", envs, range(NUM_ENVS))


def other_batch(mode):
    return VectorBatch("other", ScriptedVectorEnv(NUM_ENVS, mode), range(NUM_ENVS))


def sync_batch():
    return SyncBatch("sync", [ScriptedEnv(index) for index in range(NUM_ENVS)], range(NUM_ENVS))


BATCHES = {
    "sync": sync_batch,
    **{f"gymnasium {mode}": functools.partial(gymnasium_batch, mode) for mode in MODES},
    **{f"other {mode}": functools.partial(other_batch, mode) for mode in MODES},
}


def act(observation):
    """The action of the policy, a function of what it sees."""
    return int(observation @ [1, 2, 3]) % 4


def record(batch):
    """(transitions, episodes) of each row, as a receiver that knows only `StepBatch` sees them.

    A transition is (observation, action, reward, next observation, terminated, truncated), the
    next observation None after termination. An episode is (return, steps).
    """
    transitions: list[list] = [[] for _ in range(NUM_ENVS)]
    episodes: list[list] = [[] for _ in range(NUM_ENVS)]
    step = batch.reset()
    seen = [(tuple(row), act(row)) for row in step.observation["obs"]]
    valid = step.valid
    while min(map(len, episodes)) < EPISODES:
        # Rows that wait for their reset get an action that would change the reward if it counted.
        actions = [[action if ok else 3] for (_, action), ok in zip(seen, valid, strict=True)]
        step = batch.step(np.array(actions, np.int32))
        valid = step.valid
        for row in np.flatnonzero(valid):
            following = tuple(step.observation["obs"][row])
            after = None if step.terminated[row] else following
            if step.truncated[row]:
                after = tuple(step.final_observation["obs"][row])
            transitions[row].append(
                (*seen[row], step.reward[row], after, step.terminated[row], step.truncated[row])
            )
            if step.ended[row]:
                episodes[row].append((step.episode_return[row], step.episode_steps[row]))
            seen[row] = (following, act(np.array(following)))
    return transitions, episodes


def script_transitions(index):
    """The transitions and episodes that the script says, one after the other."""
    transitions, episodes = [], []
    for episode in range(EPISODES):
        steps, terminated, truncated = script_at(index, episode)
        total = 0.0
        for step in range(steps):
            here = np.array([index, episode, step])
            last = step + 1 == steps
            reward = reward_of(index, episode, step, act(here))
            total += reward
            transitions.append(
                (
                    tuple(here),
                    act(here),
                    reward,
                    None if last and terminated else (index, episode, step + 1),
                    last and terminated,
                    last and truncated and not terminated,
                )
            )
        episodes.append((total, steps))
    return transitions, episodes


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES.keys())
def test_recorded_transitions_are_those_of_the_script(make):
    transitions, episodes = record(make())
    for row in range(NUM_ENVS):
        wanted, wanted_episodes = script_transitions(row)
        assert transitions[row][: len(wanted)] == wanted
        assert episodes[row][:EPISODES] == wanted_episodes


def test_next_step_row_at_the_end_is_not_valid_and_tells_nothing():
    batch = other_batch("NEXT_STEP")
    batch.reset()
    # Environment 2 starts at the script's third episode, which ends on its first step.
    assert SCRIPT[2][0] == 1
    step = batch.step(np.zeros((NUM_ENVS, 1), np.int32))
    assert step.valid.tolist() == [True, True, False, False]
    assert step.reward[2] == 0
    assert not (step.terminated | step.truncated | step.ended).any()
    assert step.final_observation is None
    step = batch.step(np.zeros((NUM_ENVS, 1), np.int32))
    assert step.valid[2]
    assert step.reward[2] == reward_of(2, 0, 0, 0)
    assert step.terminated.tolist() == [False, False, True, False]
    assert step.observation["obs"][2].tolist() == [2, 1, 0]


@pytest.mark.parametrize("mode", MODES)
def test_reset_in_the_middle_forgets_the_running_episodes(mode):
    batch = other_batch(mode)
    batch.reset()
    batch.step(np.zeros((NUM_ENVS, 1), np.int32))
    step = batch.reset()
    assert step.valid.all()
    assert (step.observation["obs"][:, 2] == 0).all()
    step = batch.step(np.zeros((NUM_ENVS, 1), np.int32))
    assert not step.ended[0]
    assert step.episode_steps[0] == 1


def test_missing_final_observation_turns_truncation_into_termination():
    envs = ScriptedVectorEnv(NUM_ENVS, "SAME_STEP")
    step_with_info = envs.step
    envs.step = lambda actions: (*step_with_info(actions)[:4], {})  # type: ignore[method-assign]
    batch = VectorBatch("procgen", envs, range(NUM_ENVS))
    batch.reset()
    with pytest.warns(UserWarning, match="without giving their final observation"):
        step = batch.step(np.zeros((NUM_ENVS, 1), np.int32))
    # Environment 3 starts with an episode of one step that ends by truncation.
    assert SCRIPT[3] == (1, False, True)
    assert step.terminated[3]
    assert not step.truncated[3]
    assert step.final_observation is None


def test_autoreset_mode_must_be_declared_or_given():
    envs = ScriptedVectorEnv(NUM_ENVS, "NEXT_STEP")
    envs.metadata = {}
    with pytest.raises(EnvError, match="doesn't say how it resets itself"):
        VectorBatch("mine", envs, range(NUM_ENVS))
    with pytest.raises(EnvError, match="got 'NEXTSTEP'; did you mean 'NEXT_STEP'"):
        VectorBatch("mine", envs, range(NUM_ENVS), mode="NEXTSTEP")
    batch = VectorBatch("mine", envs, range(NUM_ENVS), mode="next_step")
    transitions, _ = record(batch)
    wanted, _ = script_transitions(0)
    assert transitions[0][: len(wanted)] == wanted


def test_step_results_are_not_overwritten_by_the_next_step():
    batch = other_batch("SAME_STEP")
    first = batch.reset().observation["obs"]
    kept = first.copy()
    batch.step(np.zeros((NUM_ENVS, 1), np.int32))
    np.testing.assert_array_equal(first, kept)
