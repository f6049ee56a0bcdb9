"""`hpcrl eval` against plain gymnasium loops that share no code with it."""

import subprocess
import sys
from collections import deque

import gymnasium
import numpy as np
import pytest
import torch
from rich.console import Console

from analysis.reader import Run
from env_wrappers import make
from hpcrl.brain import Brain
from hpcrl.config.load import to_yaml
from hpcrl.config.sections import EnvConfig
from hpcrl.evaluation.play import EvaluationError, env_seed, evaluate_run
from hpcrl.evaluation.result import Evaluation, print_evaluation
from hpcrl.evaluation.whole_episodes import Episode, episode_quota, evaluation_options
from hpcrl.learning.optim import FlatParameters
from hpcrl.run.checkpoint import Snapshot, save_checkpoint
from hpcrl.run.counters import Counters
from hpcrl.run.run_dir import RunDir
from hpcrl.specs import EnvSpec
from hpcrl.types import NetInputs
from tests.noise_env import NoiseEnv
from tests.small import config_of

CARTPOLE = {"env": {"name": "gym:CartPole-v1"}, "network": {"hidden_sizes": []}}


def random_network(config, seed=3):
    """A network with large weights, whose actions depend on everything that it is fed."""
    env = EnvSpec.from_json(make(config.env.name, 1, [0], config.env.options).spec)
    network = Brain(config, env).make_network(0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return network


def save(run, config, network, step=7):
    run_dir = RunDir(run)
    run_dir.create()
    run_dir.config.write_text(to_yaml(config), encoding="utf-8")
    flat = FlatParameters(network)
    tensors = {f"model.{n}": v.detach() for n, v in flat.named(flat.value).items()}
    counters = Counters(learner_steps=step, agent_steps=100, frames=400)
    snapshot = Snapshot(step, tensors, {"counters": counters.to_dict()})
    return save_checkpoint(run, snapshot, keep=5)


def naive_cartpole(seed, episodes, choose):
    """Returns of one environment, step by step."""
    env = gymnasium.make("CartPole-v1")
    returns, observation = [], env.reset(seed=seed)[0]
    for _ in range(episodes):
        total, done = 0.0, False
        while not done:
            observation, reward, terminated, truncated, _ = env.step(choose(observation))
            total, done = total + reward, terminated or truncated
        returns.append(total)
        observation, _ = env.reset()
    return returns


def test_hand_set_weights_play_as_in_a_plain_gymnasium_loop(tmp_path):
    config = config_of(**CARTPOLE)
    network = random_network(config)
    weights = np.array([[0.0, 0.0, 0.0, 0.0], [0.3, 1.0, 4.0, 2.0]])
    with torch.no_grad():
        network.policy.linear.weight.copy_(torch.tensor(weights))
        network.policy.linear.bias.zero_()
    save(tmp_path, config, network)
    result = evaluate_run(tmp_path, 7, 3, True, None, seed=5)

    def choose(observation):
        return int(weights[1] @ observation > 0)

    # 7 episodes in 3 environments: 3, 2 and 2.
    plan = enumerate((3, 2, 2))
    naive = [score for i, n in plan for score in naive_cartpole(env_seed(5, i), n, choose)]
    assert [e.episode_return for e in result.episodes] == naive
    assert [e.agent_steps for e in result.episodes] == naive  # reward 1 per step
    assert (result.learner_steps, result.frames) == (7, 400)


def naive_recurrent(network, seed, episodes, limit=10**9):
    """One environment with stack, core, previous action and reward done by hand.

    After `limit` steps an episode is cut off, and everything begins anew.
    """
    env = NoiseEnv()
    observation, _ = env.reset(seed=seed)
    frames = deque([np.zeros(3, np.float32)] * 4, maxlen=4)
    state, previous_action, previous_reward = torch.zeros(1, network.state_size), 0, 0.0
    first, total, ends, steps = True, 0.0, set(), 0
    played: list[float] = []
    while len(played) < episodes:
        frames.append(observation)
        inputs = NetInputs(
            {"obs": torch.from_numpy(np.stack(frames))[None, None]},
            torch.tensor([[previous_reward]], dtype=torch.float32),
            torch.tensor([[[previous_action]]], dtype=torch.int32),
            torch.tensor([[first]]),
        )
        with torch.no_grad():
            outputs, state = network(inputs, state)
        previous_action = int(outputs.policy[0, 0].argmax())
        observation, previous_reward, terminated, truncated, _ = env.step(previous_action)
        first, total, steps = terminated or truncated, total + previous_reward, steps + 1
        if not first and steps == limit:
            played.append(total)
            ends.add("cut off")
            first, total, steps = True, 0.0, 0
            observation, _ = env.reset()
            frames.extend([np.zeros(3, np.float32)] * 4)
            previous_action, previous_reward = 0, 0.0
        elif first:
            played.append(total)
            ends.add("terminated" if terminated else "truncated")
            total, steps = 0.0, 0
            observation, _ = env.reset()
            frames.extend([np.zeros(3, np.float32)] * 4)
            # A truncated episode's last reward belongs to its final observation.
            previous_reward = previous_reward if terminated else 0.0
    assert ends >= {"terminated", "truncated" if limit > 99 else "cut off"}
    return played


def test_stack_core_and_previous_inputs_are_reset_as_in_training(tmp_path):
    config = config_of(
        env={"name": "tests.noise_env:NoiseEnv", "options": {"frame_stack": 4}},
        network={
            "hidden_sizes": [6],
            "core": "lstm",
            "core_size": 5,
            "use_previous_action": True,
            "use_previous_reward": True,
        },
    )
    network = random_network(config)
    with torch.no_grad():
        network.policy.linear.bias.zero_()  # else it decides the first step alone
    save(tmp_path, config, network)
    result = evaluate_run(tmp_path, 100, 2, True, None, seed=1)
    naive = [score for i in range(2) for score in naive_recurrent(network, env_seed(1, i), 50)]
    assert [e.episode_return for e in result.episodes] == pytest.approx(naive, abs=1e-4)
    cut = evaluate_run(tmp_path, 50, 1, True, None, seed=1, max_steps=4)
    naive = naive_recurrent(network, env_seed(1, 0), 50, limit=4)
    assert [e.episode_return for e in cut.episodes] == pytest.approx(naive, abs=1e-4)


def test_episodes_per_environment_are_fixed_so_that_short_ones_are_not_favoured(tmp_path):
    options = {"episode_length": 2, "length_spread": 30}
    config = config_of(env={"name": "synthetic:counting", "options": options})
    save(tmp_path, config, random_network(config))
    result = evaluate_run(tmp_path, 10, 4, True, None, seed=0)
    lengths = [2 + env_seed(0, i) % 31 for i in range(4)]
    assert len(set(lengths)) > 2
    expected = [length for length, n in zip(lengths, (3, 3, 2, 2), strict=True) for _ in range(n)]
    assert [e.agent_steps for e in result.episodes] == expected
    # Step k gives the reward k.
    assert [e.episode_return for e in result.episodes] == [n * (n + 1) / 2 for n in expected]


def test_an_episode_past_the_step_limit_is_cut_off_and_the_next_one_is_whole(tmp_path):
    # Episodes of environment i have 2 + seed % 31 steps with reward k in step k.
    options = {"episode_length": 2, "length_spread": 30}
    config = config_of(env={"name": "synthetic:counting", "options": options})
    save(tmp_path, config, random_network(config))
    lengths = [2 + env_seed(0, i) % 31 for i in range(4)]
    limit = sorted(lengths)[1]
    assert sum(length > limit for length in lengths) == 2
    result = evaluate_run(tmp_path, 12, 4, True, None, seed=0, record=True, max_steps=limit)
    expected = [
        Episode(min(n, limit) * (min(n, limit) + 1) / 2, min(n, limit), n > limit)
        for n in lengths
        for _ in range(3)
    ]
    assert list(result.episodes) == expected
    assert f"6 of 12 episodes were cut off after {limit} agent steps" in result.messages[-1]
    assert result.summary()["cut_off_episodes"] == 6
    recorded = Run(result.folder).episodes().sort_values(["env_id", "episode"])
    assert recorded["return"].tolist() == [episode.episode_return for episode in expected]
    assert recorded["truncated"].tolist() == [episode.cut_off for episode in expected]
    assert recorded["evaluation"].all()
    assert Run(result.folder).notes == []


@pytest.mark.parametrize(
    ("episodes", "envs", "quota"),
    [(1, 8, [1]), (3, 8, [1, 1, 1]), (8, 8, [1] * 8), (9, 4, [3, 2, 2, 2]), (5, 1, [5])],
)
def test_the_quota_is_exact_and_uses_no_idle_environment(episodes, envs, quota):
    assert episode_quota(episodes, envs) == quota


def test_sampling_follows_the_seed_and_differs_from_the_greedy_policy(tmp_path):
    config = config_of(**CARTPOLE)
    network = random_network(config)
    with torch.no_grad():
        network.policy.linear.weight.mul_(0.01)
    save(tmp_path, config, network)
    greedy, once, again, other = (
        evaluate_run(tmp_path, 4, 2, greedy, None, seed).episodes
        for greedy, seed in ((True, 1), (False, 1), (False, 1), (False, 2))
    )
    assert once == again
    assert len({greedy, once, other}) == 3


def test_training_only_options_of_atari_are_switched_off_and_said():
    env = EnvConfig(name="atari:Breakout", options={"life_loss": True, "frame_stack": 4})
    options, notes = evaluation_options(env)
    assert options == {"life_loss": False, "frame_stack": 4}
    assert notes == ["env.options.life_loss True only serves training: played with False"]
    assert evaluation_options(EnvConfig(name="atari:Pong")) == ({"life_loss": False}, [])
    assert evaluation_options(EnvConfig(options={"life_loss": True})) == ({"life_loss": True}, [])


def test_a_damaged_checkpoint_is_passed_over_with_a_message(tmp_path):
    config = config_of(**CARTPOLE)
    save(tmp_path, config, random_network(config), step=3)
    damaged = save(tmp_path, config, random_network(config), step=9) / "tensors.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = evaluate_run(tmp_path, 1, 1, True, None, seed=1)
    assert result.learner_steps == 3
    assert "step-000000000009 is damaged: tensors.safetensors" in result.messages[0]
    with pytest.raises(EvaluationError, match="step-000000000009 is damaged"):
        evaluate_run(tmp_path, 1, 1, True, "9", seed=1)


@pytest.mark.parametrize("form", ["3", "step-000000000003", "{run}/checkpoints/step-000000000003"])
def test_a_checkpoint_is_chosen_by_step_name_or_path(form, tmp_path):
    config = config_of(**CARTPOLE)
    for step in (3, 9):
        save(tmp_path, config, random_network(config), step)
    asked = form.format(run=tmp_path)
    assert evaluate_run(tmp_path, 1, 1, True, asked, seed=1).learner_steps == 3


def test_what_is_missing_or_does_not_fit_is_named(tmp_path):
    config = config_of(**CARTPOLE)
    with pytest.raises(EvaluationError, match=r"can't read configuration .*config\.yaml"):
        evaluate_run(tmp_path / "absent", 1, 1, True, None, seed=1)
    save(tmp_path, config, random_network(config))
    with pytest.raises(EvaluationError, match=r"no checkpoint 8, .*learner steps there: 7"):
        evaluate_run(tmp_path, 1, 1, True, "8", seed=1)
    wider = config_of(env={"name": "gym:CartPole-v1"}, network={"hidden_sizes": [16]})
    RunDir(tmp_path).config.write_text(to_yaml(wider), encoding="utf-8")
    with pytest.raises(EvaluationError, match=r"step-000000000007: .*another network"):
        evaluate_run(tmp_path, 1, 1, True, None, seed=1)
    renamed = config_of(env={"name": "gym:CartPole-v9"})
    RunDir(tmp_path).config.write_text(to_yaml(renamed), encoding="utf-8")
    with pytest.raises(EvaluationError, match="no environment 'CartPole-v9'"):
        evaluate_run(tmp_path, 1, 1, True, None, seed=1)
    RunDir(tmp_path / "new").create()
    RunDir(tmp_path / "new").config.write_text(to_yaml(config), encoding="utf-8")
    with pytest.raises(EvaluationError, match="holds no checkpoint yet"):
        evaluate_run(tmp_path / "new", 1, 1, True, None, seed=1)


def printed(returns, messages=()):
    episodes = tuple(Episode(score, 10) for score in returns)
    console = Console(width=100)
    with console.capture() as capture:
        print_evaluation(
            Evaluation("gym:X", console_path(), 7, 4_000_000, True, episodes, messages), console
        )
    return capture.get()


def console_path():
    return RunDir("run").checkpoints / "step-000000000007"


def test_the_table_shows_mean_median_quartiles_and_extremes():
    text = printed([0.0, 10.0, 20.0, 30.0, 140.0], ("life_loss [off]",))
    for part in ("40", "20", "10 to 30", "0 to 140", "0, 10, 20, 30, 140", "4 M frames", "greedy"):
        assert part in text
    assert "note: life_loss [off]" in text
    assert "returns" not in printed([1.0] * 21)


def test_the_command_needs_no_mpi(tmp_path):
    config = config_of(**CARTPOLE)
    save(tmp_path, config, random_network(config))
    program = (
        "import sys; sys.modules['mpi4py'] = None\n"
        "from hpcrl.cli import main\n"
        f"main(['eval', {str(tmp_path)!r}, '--episodes', '3'])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "mean return" in done.stdout


def test_a_run_that_cannot_be_evaluated_ends_the_command_with_code_2(tmp_path):
    command = [sys.executable, "-m", "hpcrl", "eval", str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("hpcrl: can't read configuration")
    assert "Traceback" not in done.stderr
