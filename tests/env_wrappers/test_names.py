"""From names to environments: families, gymnasium ids and the user's own functions."""

import functools
import subprocess
import sys
import textwrap

import gymnasium
import numpy as np
import pytest

from env_wrappers import EnvError, describe, make, registered_families
from env_wrappers.sync import SyncBatch
from env_wrappers.vector import VectorBatch
from hpcrl.specs import EnvSpec
from tests.env_wrappers.scripted import ScriptedEnv

SCRIPTED = "tests.env_wrappers.scripted"


def trajectory(batch, steps=60):
    rng = np.random.default_rng(0)
    batch.reset()
    return [
        batch.step(rng.integers(0, 2, (batch.num_envs, 1)).astype(np.int32)) for _ in range(steps)
    ]


def test_describe_tells_what_the_other_ranks_need():
    spec = EnvSpec.from_json(describe("gym:CartPole-v1"))
    assert spec.name == "gym:CartPole-v1"
    assert spec.observation["obs"].array.shape == (4,)
    assert spec.action.parts[0].nvec == (2,)
    assert spec.frame_skip == 1
    assert "atari" in registered_families()


def test_gymnasium_environments_repeat_by_seed():
    first, again, other = (
        trajectory(make("gym:CartPole-v1", 2, seeds, {})) for seeds in [(1, 2), (1, 2), (5, 6)]
    )
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.observation["obs"], b.observation["obs"])
    assert not np.array_equal(first[0].observation["obs"], other[0].observation["obs"])
    assert not np.array_equal(first[0].observation["obs"][0], first[0].observation["obs"][1])


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_cart_pole_return_is_its_number_of_steps(vectorization):
    batch = make("gym:CartPole-v1", 3, [1, 2, 3], {"vectorization": vectorization})
    ends = [step for step in trajectory(batch, 100) if step.ended.any()]
    assert ends
    for step in ends:
        np.testing.assert_array_equal(
            step.episode_return[step.ended], step.episode_steps[step.ended]
        )
        assert (step.episode_steps[step.ended] > 5).all()


def test_pendulum_takes_the_continuous_action_and_is_cut_off():
    batch = make("gym:Pendulum-v1", 1, [0], {"max_episode_steps": 5})
    action = EnvSpec.from_json(batch.spec).action
    assert (action.parts[0].low, action.parts[0].high) == ((-2.0,), (2.0,))
    batch.reset()
    steps = [batch.step(np.full((1, 1), 99.0, np.float32)) for _ in range(5)]
    assert [step.truncated[0] for step in steps] == [False] * 4 + [True]
    assert steps[-1].final_observation is not None
    assert steps[-1].final_observation["obs"].shape == (1, 3)


def test_constructor_arguments_reach_the_environment():
    spec = describe("gym:FrozenLake-v1", {"kwargs": {"map_name": "8x8"}})
    assert EnvSpec.from_json(spec).observation["obs"].nvec == (64,)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Breakout", {}, "no environment name: write FAMILY:NAME"),
        ("atary:Breakout", {}, "neither a family.*nor a module.*did you mean 'atari'"),
        ("gym:CartPol-v1", {}, "no environment 'CartPol-v1'.*; did you mean 'CartPole-v1'"),
        ("gym:CartPole-v7", {}, "no environment 'CartPole-v7'.*; did you mean 'CartPole-v"),
        ("gym:ALE/Pong-v9", {}, "a family of their own: atari:Pong"),
        ("gym:no_such_pkg:Foo-v0", {}, "'no_such_pkg' cannot be imported.*pip install no_such_pkg"),
        ("gym:CartPole-v1", {"kwarg": {}}, "no option 'kwarg'; did you mean 'kwargs'"),
        ("gym:CartPole-v1", {"kwargs": {"masscart": 2}}, "doesn't take all of the kwargs"),
        ("gym:Pendulum-v1", {"vectorization": "native"}, "use vectorization sync"),
        (f"{SCRIPTED}:make_singel", {}, "has no 'make_singel'; did you mean 'make_single'"),
        (f"{SCRIPTED}:make_single", {"syze": 3}, "no option 'syze'; did you mean 'size'"),
        (f"{SCRIPTED}:make_vector", {"num_envs": 3}, "num_envs is not an option"),
        (f"{SCRIPTED}:ScriptedEnv", {}, "missing a required argument: 'index'"),
        (f"{SCRIPTED}:make_text", {}, "returned a str, expected a gymnasium.Env"),
        (f"{SCRIPTED}:make_two", {}, "a vector of 2 environments, asked for 1"),
        (f"{SCRIPTED}:make_undeclared", {}, "doesn't say how it resets itself"),
        (f"{SCRIPTED}:not_a_function", {}, "is a int, not a function"),
    ],
)
def test_what_cannot_work_is_refused(name, options, message):
    with pytest.raises(EnvError, match=message):
        make(name, 1, [0], options)


def test_package_of_a_gymnasium_id_is_told_when_missing():
    program = """
        import sys
        sys.modules["mujoco"] = None  # as if it weren't there
        from env_wrappers import EnvError, make
        try:
            make("gym:Ant-v5", 1, [0], {})
        except EnvError as error:
            print(error)
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "gym:Ant-v5 cannot be made: " in said
    assert "pip install" in said


def test_seeds_must_fit():
    with pytest.raises(EnvError, match="num_envs is 2, with 1 seeds: give one for each"):
        make("gym:CartPole-v1", 2, [0], {})
    with pytest.raises(EnvError, match="must not be negative, got -1"):
        make("gym:CartPole-v1", 1, [-1], {})


def test_users_function_may_return_single_or_vector_environments():
    single = make(f"{SCRIPTED}:make_single", 3, [0, 1, 2], {"size": 3, "frame_stack": 2})
    assert isinstance(single, SyncBatch)
    assert single.spec["observation"]["obs"]["stack"] == 2
    vector = make(f"{SCRIPTED}:make_vector", 3, [0, 1, 2], {"mode": "DISABLED"})
    assert isinstance(vector, VectorBatch)
    for batch in (single, vector):
        assert batch.reset().observation["obs"].shape == (3, 3)


def test_users_module_is_found_in_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "my_own_env.py").write_text(
        "import gymnasium\ndef build(**options):\n    return gymnasium.make('CartPole-v1')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert make("my_own_env:build", 1, [0], {"anything": 1}).spec["name"] == "my_own_env:build"


def test_error_inside_the_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "my_broken_env.py").write_text("import a_package_that_is_missing\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        make("my_broken_env:build", 1, [0], {})


def with_step(result):
    """A scripted environment whose step gives `result`."""
    env = ScriptedEnv(0)
    env.step = lambda action: result  # type: ignore[method-assign]
    return env


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((np.zeros(3, np.float32), np.nan, False, False, {}), "environment 0 is nan"),
        ((np.zeros(3, np.float32), np.inf, False, False, {}), "environment 0 is inf"),
        ((np.zeros(3, np.float32), [1, 2], False, False, {}), r"shape \(1, 2\), expected \(1,\)"),
        ((np.zeros(4, np.float32), 0.0, False, False, {}), r"expected shape \(3,\), got \(4,\)"),
    ],
)
def test_bad_results_of_a_step_are_refused(result, message):
    batch = SyncBatch("mine", [with_step(result)], [0])
    batch.reset()
    with pytest.raises(EnvError, match=message):
        batch.step(np.zeros((1, 1), np.int32))


def test_environments_of_different_spaces_are_refused():
    other = ScriptedEnv(1)
    other.action_space = gymnasium.spaces.Discrete(2)
    with pytest.raises(EnvError, match="environment 1 has other spaces"):
        SyncBatch("mine", [ScriptedEnv(0), other], [0, 1])


def test_close_closes_every_environment():
    closed: list[int] = []
    envs = [ScriptedEnv(index) for index in range(2)]
    for env in envs:
        env.close = functools.partial(closed.append, env.index)  # type: ignore[method-assign]
    SyncBatch("mine", envs, [0, 1]).close()
    assert closed == [0, 1]


def test_an_atari_actor_stays_small_and_imports_no_learner():
    script = """
        import sys
        import numpy as np
        from env_wrappers import make
        batch = make("atari:Breakout", 8, range(8), {})
        batch.reset()
        for _ in range(50):
            batch.step(np.zeros((8, 1), np.int32))
        heavy = {"torch", "mpi4py", "hpcrl", "cv2", "jax", "scipy", "matplotlib", "pygame"}
        print(sorted(heavy & set(sys.modules)))
        status = open("/proc/self/status").read()
        print(int(status.split("VmHWM:")[1].split()[0]) // 1024)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    heavy, resident_mib = done.stdout.split("\n")[:2]
    assert heavy == "[]"
    assert int(resident_mib) < 120
