"""Drives an acting policy over single environments, and says what its unrolls must hold."""

import numpy as np
import torch

from env_wrappers import StepBatch, make
from env_wrappers.sync import SyncBatch
from env_wrappers.vector import VectorBatch
from hpcrl.acting.policy import ActingPolicy
from hpcrl.comm.slots import Rows
from hpcrl.comm.wire import unroll_layout
from hpcrl.learning.optim import FlatParameters
from hpcrl.specs import EnvSpec
from tests.env_wrappers.scripted import ScriptedEnv, ScriptedVectorEnv
from tests.small import brain_of, rows_of

CPU = torch.device("cpu")
RECURRENT = {
    "core": "lstm",
    "core_size": 5,
    "use_previous_action": True,
    "use_previous_reward": True,
    "previous_reward_clip": 0.0,
}


def counting(**options):
    """A maker of counting environments."""
    return lambda index: make("synthetic:counting", 1, [index], {"episode_length": 3, **options})


def scripted(index):
    """Ends by termination and by truncation, after 1 to 4 steps."""
    return SyncBatch("scripted", [ScriptedEnv(index)], [0])


def next_step(index):
    """As `scripted`, but each reset takes a step of its own, whose row is not valid."""
    envs = ScriptedVectorEnv(1, "NEXT_STEP")
    envs.envs = [ScriptedEnv(index)]
    return VectorBatch("scripted", envs, [0])


KINDS = {
    "terminating": counting(length_spread=2),
    "truncating": counting(length_spread=2, truncate=True),
    "scripted": scripted,
    "next_step": next_step,
    "stacked": counting(observation_shape=(2,), frame_stack=4, truncate=True, length_spread=3),
}


def weights(brain, seed):
    """A flat parameter buffer, large enough that outputs differ clearly."""
    return FlatParameters(brain.make_network(seed)).value.numpy() * 3.0


def row_of(batch: StepBatch, row: int) -> StepBatch:
    """The part of one environment, copied, as a batch of one."""
    columns = {
        name: value[row : row + 1].copy()
        for name, value in batch._asdict().items()
        if isinstance(value, np.ndarray)
    }
    final = batch.final_observation
    return StepBatch(
        observation={path: leaf[row : row + 1].copy() for path, leaf in batch.observation.items()},
        final_observation=None
        if final is None
        else {path: leaf[row : row + 1].copy() for path, leaf in final.items()},
        **columns,
    )


class Expected:
    """The rows that the answers of one environment must become, since its last restart."""

    def __init__(self, action_size: int):
        self.rows: list[dict] = []
        self._previous = np.zeros(action_size)

    def add(self, given: StepBatch, action, version=None) -> None:
        """Note what the environment gave (a batch of one) and the action taken on it."""
        fresh = not self.rows
        cut = bool(given.truncated[0]) and not fresh
        row = {
            "reward": 0.0 if fresh else given.reward[0],
            "terminated": bool(given.terminated[0]) and not fresh,
            "start": fresh or bool(given.terminated[0]) or cut,
            "final": False,
            "previous_action": self._previous,
            "policy_version": version,
        }
        if cut:
            last = {path: leaf[0] for path, leaf in given.final_observation.items()}
            self.rows.append({**row, "start": False, "final": True, "obs": last, "action": None})
            row["reward"] = 0.0
        first = {path: leaf[0] for path, leaf in given.observation.items()}
        self.rows.append({**row, "obs": first, "action": action})
        self._previous = action

    def check(self, unrolls, unroll_steps) -> None:
        """Assert that `unrolls`, field by field, are the consecutive slices of the rows."""
        for index, unroll in enumerate(unrolls):
            rows = self.rows[index * unroll_steps : (index + 1) * unroll_steps + 1]
            assert len(rows) == unroll_steps + 1
            assert unroll["unroll_index"] == index
            for name in ("reward", "terminated", "start", "final"):
                assert unroll[name].tolist() == [row[name] for row in rows], name
            for t, row in enumerate(rows):
                if row["policy_version"] is not None:
                    assert unroll["policy_version"][t] == row["policy_version"]
                np.testing.assert_array_equal(unroll["previous_action"][t], row["previous_action"])
                if row["action"] is not None:
                    np.testing.assert_array_equal(unroll["action"][t], row["action"])
                for path, leaf in row["obs"].items():
                    np.testing.assert_array_equal(unroll[f"obs:{path}"][t], leaf)


class Stage:
    """Environments of one kind and the policy that acts in them, in random batches."""

    def __init__(self, kind, num_envs=3, unroll_steps=4, seed=0, **sections):
        self.envs = [KINDS[kind](index) for index in range(num_envs)]
        self.spec = EnvSpec.from_json(self.envs[0].spec)
        sections = {"network": {"hidden_sizes": [8], **RECURRENT}, **sections}
        self.brain = brain_of(self.spec, **sections)
        self.unroll_steps = unroll_steps
        core_size = self.brain.make_network(0).state_size
        window = self.brain.window
        items = window.items_per_unroll if window else 0
        self.layout = unroll_layout(self.spec, self.brain.behaviour, unroll_steps, core_size, items)
        env_ids = np.arange(num_envs, dtype=np.int64)
        self.policy = ActingPolicy(
            self.brain,
            self.spec,
            self.layout,
            unroll_steps,
            env_ids,
            CPU,
            "float32",
            seed=1,
            exploration=self.brain.exploration(env_ids, num_envs),
        )
        self.policy.load(weights(self.brain, 3), 0)
        self.rng = np.random.default_rng(seed)
        self.given = [env.reset() for env in self.envs]
        self.run_ids = [0] * num_envs
        self.expected = [Expected(self.spec.action.size) for _ in self.envs]
        self.unrolls: list[np.ndarray] = []

    def restart(self, index):
        """Replace an environment by a new one, as after a crash."""
        self.envs[index] = KINDS["scripted"](index)
        self.given[index] = self.envs[index].reset()
        self.forget(index)

    def forget(self, index):
        """Begin a new run of an environment."""
        self.run_ids[index] += 1
        self.expected[index] = Expected(self.spec.action.size)

    def step(self, chosen=None):
        """Let a random batch of environments act, and step them."""
        if chosen is None:
            size = self.rng.integers(1, len(self.envs) + 1)
            chosen = np.sort(self.rng.choice(len(self.envs), size, replace=False))
        valid = [index for index in chosen if self.given[index].valid[0]]
        no_action = np.zeros(self.spec.action.size, self.spec.action.dtype)
        actions = dict.fromkeys(chosen, no_action)
        if valid:
            chosen_actions = self.policy.act(self._rows(valid))
            actions |= dict(zip(valid, chosen_actions, strict=True))
            for index in valid:
                self.expected[index].add(self.given[index], actions[index], self.policy.version)
            for unrolls in self.policy.record():
                self.unrolls += list(unrolls)
        for index in chosen:
            self.given[index] = self.envs[index].step(actions[index][None])

    def _rows(self, indices):
        parts = [rows_of(self.given[i], [0], self.run_ids[i]) for i in indices]
        finals = [part.final_observation for part in parts]
        paths = list(self.spec.observation)
        blank = {path: np.full_like(parts[0].observation[path], 99) for path in paths}
        return Rows(
            ids=np.array(indices, np.intp),
            run_id=np.concatenate([part.run_id for part in parts]),
            observation={p: np.concatenate([part.observation[p] for part in parts]) for p in paths},
            reward=np.concatenate([part.reward for part in parts]),
            terminated=np.concatenate([part.terminated for part in parts]),
            truncated=np.concatenate([part.truncated for part in parts]),
            final_observation={
                p: np.concatenate([(final or blank)[p] for final in finals]) for p in paths
            }
            if any(final is not None for final in finals)
            else None,
        )

    def views(self):
        """All complete unrolls so far, `[n, ...]` by field."""
        return self.layout.views(np.stack(self.unrolls))
