"""One suite for every family: what a receiver of a batch relies on, one test for each property.

It runs on the example of every family that is installed, once directly and once in a child
process; `conftest.py` lists the others.
"""

import functools

import numpy as np
import psutil
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import env_wrappers
from env_wrappers.errors import ActionError, EnvError
from env_wrappers.families import FAMILIES
from env_wrappers.vector import VectorBatch
from hpcrl.specs import EnvSpec
from tests.env_wrappers.conformance import NUM_ENVS, plain_loop, record, subjects

# Some families compile for a minute whenever a batch is made, and a test makes up to three.
pytestmark = pytest.mark.timeout(400)

STEPS = 60
ALL = {subject.key: subject for subject in subjects()}
SINGLE = {
    key: s
    for key, s in ALL.items()
    if not s.isolated and env_wrappers.make_env(s.name, s.options()) is not None
}


def each(chosen):
    return pytest.mark.parametrize("subject", chosen.values(), ids=chosen.keys())


@functools.cache
def baseline(key):
    """What the subject gives with the usual seeds."""
    return recorded(ALL[key])


def recorded(subject, steps=STEPS, seeds=None, look=None, **options):
    batch = subject.make(seeds, **options)
    try:
        return record(batch, steps, look and (lambda step: look(batch, step)))
    finally:
        batch.close()


@pytest.fixture(autouse=True)
def _no_process_is_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert not left, left


def test_the_families_of_the_default_installation_run():
    run = {subject.family.key for subject in ALL.values()}
    assert {family.key for family in FAMILIES if family.in_default and family.example} <= run


@each(ALL)
def test_the_same_seeds_give_the_same_trajectory_and_others_another(subject):
    first, again = baseline(subject.key), recorded(subject)
    assert first == again
    other = recorded(subject, seeds=range(500, 500 + subject.rows))
    assert other.transitions != first.transitions
    one = subject.family.rows_per_env
    starts = [first.transitions[row] for row in range(0, subject.rows, one)]
    observed = [[transition.seen for transition in row] for row in starts]
    assert all(observed[0] != row for row in observed[1:]), "two environments are the same"


@each(SINGLE)
@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP", "DISABLED"])
def test_every_way_of_resetting_gives_the_transitions_of_a_plain_loop(subject, mode):
    options = subject.options(limit_steps=25)

    def build():
        return env_wrappers.make_env(subject.name, options)

    seeds = range(100, 100 + NUM_ENVS)
    envs = SyncVectorEnv([build] * NUM_ENVS, autoreset_mode=AutoresetMode[mode])
    vector = VectorBatch(subject.name, envs, seeds)
    direct = subject.make(limit_steps=25)
    found, own = record(vector, STEPS), record(direct, STEPS)
    for row, seed in enumerate(seeds):
        env = build()
        wanted = plain_loop(env, seed, row, direct.spec, STEPS)
        env.close()
        assert any(transition.truncated or transition.terminated for transition in wanted)
        assert found.transitions[row] == own.transitions[row] == wanted
    vector.close()
    direct.close()


def test_a_familys_own_ways_of_resetting_give_the_same_transitions():
    for subject in ALL.values():
        found = [
            recorded(subject, autoreset_mode=mode, limit_steps=15) for mode in subject.family.modes
        ]
        for other in found:
            assert any(transition.truncated for transition in other.transitions[0])
            assert other == found[0]


@each(ALL)
def test_every_transition_counts_once_in_its_episode(subject):
    """No bogus step is recorded: the real ones add up to what each episode is said to have been."""
    limit = {"limit_steps": 20} if subject.family.limit[0] else {}
    found = recorded(subject, **limit)
    for transitions, episodes in zip(found.transitions, found.episodes, strict=True):
        assert episodes
        first = 0
        for total, steps in episodes:
            played = transitions[first : first + steps]
            first += steps
            if len(played) < steps:
                break  # its end is past what was kept
            rewards = [transition.reward for transition in played]
            np.testing.assert_allclose(sum(rewards), total, rtol=1e-4, atol=1e-4)


@each({key: s for key, s in ALL.items() if s.family.limit[0]})
def test_an_episode_that_is_cut_off_is_truncated_and_shows_its_final_observation(subject):
    """Against the same environments without the limit, which go on at that place."""
    limit = 6
    long, cut = recorded(subject, limit), recorded(subject, limit, limit_steps=limit)
    for wanted, found in zip(long.transitions, cut.transitions, strict=True):
        assert not any(transition.truncated for transition in wanted)
        assert found[: limit - 1] == wanted[: limit - 1]
        if any(transition.terminated for transition in wanted):
            continue  # a death before the limit
        assert found[-1] == wanted[-1]._replace(truncated=True)
    assert any(row[-1].truncated for row in cut.transitions)


@each(ALL)
def test_spaces_are_honoured(subject):
    def look(batch, step):
        batch.check(step)
        leaves = EnvSpec.from_json(batch.spec).observation
        for path, leaf in leaves.items():
            assert step.observation[path].shape == (batch.num_envs, *leaf.array.shape)
            assert step.observation[path].dtype == leaf.array.dtype
        assert not (step.terminated & step.truncated).any()
        assert step.reward.dtype == np.float32
        assert np.isfinite(step.reward).all()

    recorded(subject, look=look)
    batch = subject.make()
    action = EnvSpec.from_json(batch.spec).action
    batch.reset()
    wrong = np.full((batch.num_envs, action.size), 1000, action.dtype)
    if any(part.kind == "discrete" for part in action.parts):
        with pytest.raises(ActionError, match="expected a category from 0 to"):
            batch.step(wrong)
    else:
        batch.step(wrong)  # clipped
    batch.close()


@each(ALL)
def test_what_was_returned_is_the_callers(subject):
    """Neither do later steps change it, nor does changing it change later steps."""
    kept = []

    def spoil(batch, step):
        arrays = [*step.observation.values(), *(step.final_observation or {}).values()]
        arrays += [step.reward, step.episode_return, step.terminated, step.truncated, step.valid]
        kept.append((arrays, [array.copy() for array in arrays]))
        if len(kept) > 5:
            old, copies = kept.pop(0)
            for array, copy in zip(old, copies, strict=True):
                np.testing.assert_array_equal(array, copy)
                array[...] = 1

    assert recorded(subject, look=spoil) == baseline(subject.key)


@each({key: s for key, s in ALL.items() if not s.isolated})
def test_thread_counts_are_honoured(subject):
    recorded(subject, 5)  # what libraries start once
    key, counts = subject.family.threads, []
    for threads in (1, 2) if key else (1,):
        before = psutil.Process().num_threads()
        batch = subject.make(**({key: threads} if key else {}))
        batch.reset()
        counts.append(psutil.Process().num_threads() - before)
        batch.close()
        assert psutil.Process().num_threads() == before
    # EnvPool has one more, which hands out the work.
    waiting = subject.family.waiting_threads * subject.rows
    assert counts in ([[1, 2], [2, 3]] if key else [[waiting]])


@each({key: s for key, s in SINGLE.items() if s.family.renders})
def test_it_renders_to_frames(subject):
    env = env_wrappers.make_env(subject.name, subject.options(), render_mode="rgb_array")
    env.reset(seed=1)
    frame = env.render()
    env.close()
    assert frame.dtype == np.uint8
    assert frame.ndim == 3
    assert frame.shape[2] == 3
    assert frame.min() < frame.max()


@each({key: s for key, s in ALL.items() if s.isolated and not s.python})
def test_a_child_process_gives_what_is_given_here(subject):
    assert baseline(subject.key) == baseline(subject._replace(isolated=False).key)


@each({key: s for key, s in ALL.items() if not s.isolated})
def test_an_unknown_name_is_refused_with_the_closest_ones(subject):
    family = subject.family
    with pytest.raises(EnvError, match=f"did you mean '{family.example[:4]}"):
        env_wrappers.make(f"{family.name}:{family.example[:-1]}x", 1, [0])


@each({key: s for key, s in ALL.items() if not s.isolated})
def test_an_unknown_option_is_refused(subject):
    with pytest.raises(EnvError, match="has no option 'no_such_option'"):
        subject.make(no_such_option=1)
