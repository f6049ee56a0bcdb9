"""Batches in JAX against plain loops; collected where JAX is installed."""

import functools
import subprocess
import sys

import gymnasium
import jax
import numpy as np
import pytest
from jax import numpy as jnp

import env_wrappers
from env_wrappers import jax_start
from env_wrappers.jax_vector import JaxTask, JaxVectorEnv
from env_wrappers.vector import VectorBatch
from tests.env_wrappers.conformance import record

jax_start.start_jax("tests", jax_start.JAX_OPTIONS)


@functools.cache
def counter(length, max_steps=0, terminates=True):
    """Counts its steps; observes (number drawn at the reset, count). Weakly typed on purpose."""

    def reset(key):
        state = {"drawn": jax.random.randint(key, (), 0, 2**20), "count": 0}
        return state, see(state)

    def step(key, state, action):
        state = {"drawn": state["drawn"], "count": state["count"] + 1}
        ended = (state["count"] >= length) & terminates
        return state, see(state), 10 * state["count"] + action, ended

    def see(state):
        return jnp.stack([state["drawn"] * 1.0, state["count"] * 1.0])

    box = gymnasium.spaces.Box(0, np.inf, (2,), np.float32)
    return JaxTask(reset, step, box, gymnasium.spaces.Discrete(4), max_steps)


@pytest.mark.parametrize(("num_envs", "length"), [(1, 3), (40, 1), (40, 4)])
def test_rewards_ends_and_first_observations_are_those_of_counting(num_envs, length):
    """More environments than are reset at once end on the same step."""
    batch = VectorBatch("counter", JaxVectorEnv(counter(length), range(num_envs)), None)
    step = batch.reset()
    drawn = step.observation["obs"][:, 0].copy()
    assert len(set(drawn)) == num_envs
    for time in range(1, 3 * length + 1):
        action = np.arange(num_envs)[:, None].astype(np.int32) % 4
        step = batch.step(action)
        count = (time - 1) % length + 1
        np.testing.assert_array_equal(step.reward, 10 * count + action[:, 0])
        ended = count == length
        assert (step.terminated == ended).all()
        assert not step.truncated.any()
        np.testing.assert_array_equal(step.observation["obs"][:, 1], 0 if ended else count)
        assert (step.observation["obs"][:, 0] != drawn).all() == ended
        drawn = step.observation["obs"][:, 0].copy()
        if ended:
            assert (step.episode_steps == length).all()


def test_only_the_environments_that_are_done_start_anew():
    task = counter(5)
    envs = JaxVectorEnv(task, range(3))
    batch = VectorBatch("counter", envs, None)
    batch.reset()
    batch.step(np.zeros((3, 1), np.int32))
    # Environment 1 is put back by two steps, so it ends two steps after the others.
    state, steps = envs._state
    count = np.array(state["count"])
    count[1] -= 2
    envs._state = [{**state, "count": jnp.asarray(count)}, steps]
    ends = [batch.step(np.zeros((3, 1), np.int32)).terminated.tolist() for _ in range(6)]
    assert ends[3] == [True, False, True]
    assert ends[5] == [False, True, False]
    assert [any(row) for row in ends] == [False, False, False, True, False, True]


@pytest.mark.parametrize("given", [0, 3])
def test_the_limit_of_time_truncates_and_shows_the_final_observation(given):
    task = counter(1, max_steps=5, terminates=False)
    batch = VectorBatch("counter", JaxVectorEnv(task, [7, 8], given), None)
    first = batch.reset().observation["obs"]
    limit = given or 5
    for time in range(1, limit + 1):
        step = batch.step(np.zeros((2, 1), np.int32))
        assert (step.truncated == (time == limit)).all()
    np.testing.assert_array_equal(step.final_observation["obs"], [[d, limit] for d in first[:, 0]])
    assert (step.observation["obs"][:, 1] == 0).all()
    assert not step.terminated.any()


def test_a_termination_at_the_limit_is_no_truncation():
    batch = VectorBatch("counter", JaxVectorEnv(counter(4, max_steps=4), [1]), None)
    batch.reset()
    for _ in range(4):
        step = batch.step(np.zeros((1, 1), np.int32))
    assert step.terminated.tolist() == [True]
    assert step.truncated.tolist() == [False]


def test_a_reset_in_the_middle_starts_other_episodes():
    batch = VectorBatch("counter", JaxVectorEnv(counter(9), [3, 4]), None)
    first = batch.reset().observation["obs"]
    batch.step(np.zeros((2, 1), np.int32))
    again = batch.reset().observation["obs"]
    assert (again[:, 1] == 0).all()
    assert (again[:, 0] != first[:, 0]).all()


def test_an_environment_does_what_it_does_in_any_batch():
    many = JaxVectorEnv(counter(2), [5, 11, 5])
    one = JaxVectorEnv(counter(2), [11])
    together, alone = many.reset()[0], one.reset()[0]
    for _ in range(5):
        np.testing.assert_array_equal(together[1], alone[0])
        np.testing.assert_array_equal(together[0], together[2])
        together, alone = many.step(np.ones(3))[0], one.step(np.ones(1))[0]


def test_cartpole_moves_as_the_equations_say():
    """Against the equations of Barto, Sutton & Anderson, written out once more."""
    found = record(env_wrappers.make("gymnax:CartPole-v1", 2, [1, 2]), 12)
    for row in found.transitions:
        for transition in row:
            if transition.after is None:
                continue
            x, x_dot, theta, theta_dot = np.frombuffer(transition.seen, np.float32)
            force = 10.0 if np.frombuffer(transition.action, np.int32)[0] == 1 else -10.0
            push = (force + 0.05 * theta_dot**2 * np.sin(theta)) / 1.1
            angular = (9.8 * np.sin(theta) - np.cos(theta) * push) / (
                0.5 * (4 / 3 - 0.1 * np.cos(theta) ** 2 / 1.1)
            )
            linear = push - 0.05 * angular * np.cos(theta) / 1.1
            wanted = [x + 0.02 * x_dot, x_dot + 0.02 * linear]
            wanted += [theta + 0.02 * theta_dot, theta_dot + 0.02 * angular]
            after = np.frombuffer(transition.after, np.float32)
            np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=1e-5)
            assert transition.reward == 1.0


_COUNT = """
import os, sys
from env_wrappers.jax_start import JAX_OPTIONS, start_jax
jax = start_jax("a test", {**JAX_OPTIONS, "num_threads": int(sys.argv[1])})
jax.jit(lambda a: a @ a)(jax.numpy.ones((700, 700))).block_until_ready()
tasks = (open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task"))
print(sum("XLAEigen" in name for name in tasks))
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_the_pool_that_computes_has_the_threads_that_were_asked_for(threads):
    command = [sys.executable, "-c", _COUNT, str(threads)]
    counted = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert int(counted.stdout) == threads
