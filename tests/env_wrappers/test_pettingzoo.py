"""Agents as rows: against a plain loop over the dictionaries of a scripted environment."""

import gymnasium
import numpy as np
import pytest

from env_wrappers import EnvError, make
from env_wrappers.pettingzoo import AgentsBatch
from tests.env_wrappers.conformance import record

AGENTS = ("ann", "bob", "cy")
# (step at which the agent's episode ends, whether by truncation), by episode and agent.
LIVES = [((3, False), (5, True), (5, False)), ((4, True), (1, False), (2, True)), ((2, False),) * 3]


class Scripted:
    """Observes (environment, agent, episode, step); its agents die at different times."""

    possible_agents = AGENTS

    def __init__(self, index):
        self.index, self.episode, self.agents = index, -1, []

    def observation_space(self, agent):
        return gymnasium.spaces.Box(0, np.inf, (4,), np.float32)

    def action_space(self, agent):
        return gymnasium.spaces.Discrete(5)

    def reset(self, seed=None, options=None):
        self.episode, self.now, self.agents = self.episode + 1, 0, list(AGENTS)
        return {agent: self.see(agent) for agent in AGENTS}, {agent: {} for agent in AGENTS}

    def see(self, agent):
        return np.array([self.index, AGENTS.index(agent), self.episode, self.now], np.float32)

    def end(self, agent):
        return LIVES[(self.episode + self.index) % len(LIVES)][AGENTS.index(agent)]

    def step(self, actions):
        assert set(actions) == set(self.agents), "an action for an agent that is not there"
        self.now += 1
        acted = self.agents
        over = {agent: self.now == self.end(agent)[0] for agent in acted}
        self.agents = [agent for agent in acted if not over[agent]]
        return (
            {agent: self.see(agent) for agent in acted},
            {agent: 10 * self.now + float(actions[agent]) for agent in acted},
            {agent: over[agent] and not self.end(agent)[1] for agent in acted},
            {agent: over[agent] and self.end(agent)[1] for agent in acted},
            {agent: {} for agent in acted},
        )

    def close(self):
        pass


def scripted(envs=2, **options):
    return AgentsBatch(
        "x:y", [Scripted(i) for i in range(envs)], range(len(AGENTS) * envs), **options
    )


def observed(data):
    return None if data is None else np.frombuffer(data, np.float32).tolist()


def test_every_agents_transitions_are_those_of_its_life_and_no_other():
    found = record(scripted(), 40)
    for row in range(2 * len(AGENTS)):
        index, agent = divmod(row, len(AGENTS))
        episode, step, total = 0, 0, 0.0
        for transition in found.transitions[row]:
            length, cut = LIVES[(episode + index) % len(LIVES)][agent]
            assert observed(transition.seen) == [index, agent, episode, step]
            step += 1
            action = int(np.frombuffer(transition.action, np.int32)[0])
            assert transition.reward == 10 * step + action
            total += transition.reward
            ends = step == length
            assert (transition.terminated, transition.truncated) == (ends and not cut, ends and cut)
            if not ends or cut:
                assert observed(transition.after) == [index, agent, episode, step]
            if ends:
                assert found.episodes[row][episode] == (total, length)
                episode, step, total = episode + 1, 0, 0.0
        assert episode > 5


def test_a_dead_agents_row_is_not_valid_until_its_environment_starts_anew():
    batch = scripted(1)
    batch.reset()
    valid = []
    for _ in range(5):
        step = batch.step(np.zeros((3, 1), np.int32))
        valid.append(step.valid.tolist())
        assert not step.reward[~step.valid].any()
        assert not (step.terminated | step.truncated | step.ended)[~step.valid].any()
    # The first dies at step 3, the other two at step 5, when all start anew.
    assert valid == [[True] * 3, [True] * 3, [False, True, True], [False, True, True], [True] * 3]
    assert step.ended.all()
    assert step.terminated.tolist() == [True, False, True]
    assert step.truncated.tolist() == [False, True, False]
    assert step.episode_steps.tolist() == [3, 5, 5]
    assert step.observation["obs"].tolist() == [[0, agent, 1, 0] for agent in range(3)]
    assert step.final_observation["obs"][1].tolist() == [0, 1, 0, 5]


def test_a_limit_truncates_the_agents_that_still_play():
    batch = scripted(1, max_episode_steps=4)
    batch.reset()
    for _ in range(4):
        step = batch.step(np.zeros((3, 1), np.int32))
    assert step.terminated.tolist() == [True, False, False]
    assert step.truncated.tolist() == [False, True, True]


def test_what_cannot_work_is_refused():
    with pytest.raises(EnvError, match=r"has 3 agents.*4 rows: make env.envs_per_actor"):
        make("pettingzoo:simple_spread_v3", 4, range(4))
    with pytest.raises(EnvError, match="did you mean 'simple_spread_v3'"):
        make("pettingzoo:simple_spred_v3", 3, range(3))
    with pytest.raises(EnvError, match=r"doesn't take all of the kwargs \{'M': 2\}"):
        make("pettingzoo:simple_spread_v3", 3, range(3), {"kwargs": {"M": 2}})
    with pytest.raises(EnvError, match="the observation space of agent 'agent_0' is"):
        make("pettingzoo:simple_tag_v3", 4, range(4))
    odd = Scripted(0)
    odd.episode, odd.now = 0, 0
    alone = {"ann": odd.see("ann")}
    odd.reset = lambda seed=None: (alone, {})  # type: ignore[assignment, method-assign]
    with pytest.raises(EnvError, match="agent 'bob' is not there at the start"):
        AgentsBatch("x:y", [odd], range(3)).reset()


def test_number_of_agents_follows_the_kwargs():
    batch = make("pettingzoo:mpe2.simple_spread_v3", 4, range(4), {"kwargs": {"N": 2}})
    assert batch.reset().observation["obs"].shape == (4, 12)
    batch.close()
