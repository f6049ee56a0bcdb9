"""The acting policy: network, per-environment state, and the unrolls that acting leaves behind.

Inference ranks and ranks with local inference use `ActingPolicy`, evaluation `Policy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hpcrl.acting.forward import make_forward
from hpcrl.acting.initial_priority import InitialPriorities
from hpcrl.acting.unroll import UnrollStore
from hpcrl.brain import Brain
from hpcrl.comm.slots import Rows
from hpcrl.comm.wire import Layout
from hpcrl.learning.optim import FlatParameters
from hpcrl.ops.exploration import Exploration
from hpcrl.ops.frame_stack import FrameStacker
from hpcrl.specs import EnvSpec


class Decided(NamedTuple):
    """Rows with everything that their unrolls keep, not yet appended.

    Attributes:
      ids: `<intp>[n]`.
      fields: every field of `wire.row_fields`, `[n, ...]`.
      core_state: `<float32>[n, S]`, before these rows.
      prefix: stacked leaves' last K-1 frames before these rows, `[n, K-1, ...]`.
    """

    ids: npt.NDArray[np.intp]
    fields: dict[str, npt.NDArray[np.generic]]
    core_state: torch.Tensor
    prefix: dict[str, npt.NDArray[np.generic]]

    def of(self, chosen: npt.NDArray[np.bool_]) -> Decided:
        """Return the rows where `chosen`, `<bool>[n]`."""
        return Decided(
            self.ids[chosen],
            {name: field[chosen] for name, field in self.fields.items()},
            self.core_state[torch.from_numpy(chosen)],
            {name: frames[chosen] for name, frames in self.prefix.items()},
        )

    def observation(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the observation leaves by path, `[n, ...]`, single frames."""
        paths = [name for name in self.fields if name.startswith("obs:")]
        return {name.removeprefix("obs:"): self.fields[name] for name in paths}

    @classmethod
    def joined(cls, parts: Sequence[Decided]) -> Decided:
        """Return the rows of all `parts`, one after the other."""
        first = parts[0]
        return cls(
            np.concatenate([part.ids for part in parts]),
            {n: np.concatenate([part.fields[n] for part in parts]) for n in first.fields},
            torch.cat([part.core_state for part in parts]),
            {n: np.concatenate([part.prefix[n] for part in parts]) for n in first.prefix},
        )


class RowSink(Protocol):
    """Takes rows in the order in which each environment gave them."""

    def add(
        self, ids: npt.NDArray[np.intp], rows: Mapping[str, npt.NDArray[np.generic]], /
    ) -> None:
        """Take one row of each of `ids`, every field of `wire.row_fields`."""

    def replace(
        self, ids: npt.NDArray[np.intp], rows: Mapping[str, npt.NDArray[np.generic]], /
    ) -> None:
        """Take these in place of the last rows of `ids`: another action was chosen."""


class Policy:
    """Chooses actions for N environments in any batches.

    Args:
      brain: network and acting rule.
      env: the environment's spec.
      num_rows: N.
      device: where the network lives.
      precision: autocast of the forward pass.
      seed: of the action sampling.
      greedy: take the likeliest action instead of a sample.
      epsilon: `<float32>[N]`, probability of an action at random, for agents that explore so.
      graphs: use CUDA graphs where `device` is a GPU.
    """

    def __init__(
        self,
        brain: Brain,
        env: EnvSpec,
        num_rows: int,
        device: torch.device,
        precision: str,
        seed: int,
        greedy: bool = False,
        epsilon: npt.NDArray[np.float32] | None = None,
        graphs: bool = True,
    ):
        self._epsilon = None if epsilon is None else torch.from_numpy(epsilon).to(device)
        self._network = brain.make_network(seed=0).to(device).eval()
        self._flat = FlatParameters(self._network)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._forward = make_forward(
            brain, self._network, device, precision, self._generator, greedy, graphs
        )
        self._core_state = self._network.initial_state(num_rows).to(device)
        self._previous_action = np.zeros((num_rows, env.action.size), env.action.dtype)
        self._run_id = np.full(num_rows, -1, np.int64)
        self._stackers = {
            path: FrameStacker(num_rows, leaf.stack, leaf.array.shape, leaf.array.dtype)
            for path, leaf in env.observation.items()
            if leaf.stack > 1
        }
        self.version = -1
        self.restarts = 0

    @property
    def num_parameters(self) -> int:
        """Length of the flat parameter buffer."""
        return self._flat.value.numel()

    def load(self, parameters: npt.NDArray[np.float32], version: int) -> None:
        """Swap in a whole copy of the weights `<float32>[P]`, between batches."""
        self._flat.value.copy_(torch.from_numpy(parameters))
        self.version = version

    def act(self, rows: Rows) -> npt.NDArray[np.generic]:
        """Return the actions `[N, A]` of `rows`, of which there may be none."""
        if len(rows.ids) == 0:
            return self._previous_action[:0]  # only rows of environments that reset themselves
        restarted = rows.run_id != self._run_id[rows.ids]
        if restarted.any():
            self._restart(rows.ids[restarted], rows.run_id[restarted])
        start = restarted | rows.terminated | rows.truncated
        reward, truncated = rows.reward, rows.truncated & ~restarted
        if truncated.any() and rows.final_observation is not None:
            # The last observation becomes a row of its own; the new episode's first row
            # follows with reward 0, as its reward belongs to the final row.
            final = {path: leaf[truncated] for path, leaf in rows.final_observation.items()}
            count = int(truncated.sum())
            self._evaluate(
                rows.ids[truncated],
                final,
                reward[truncated],
                terminated=np.zeros(count, bool),
                start=np.zeros(count, bool),
                final=np.ones(count, bool),
            )
            reward = np.where(truncated, np.float32(0), reward)
        if restarted.any():
            reward = np.where(restarted, np.float32(0), reward)
        return self._evaluate(
            rows.ids,
            rows.observation,
            reward,
            terminated=rows.terminated & ~restarted,
            start=start,
            final=np.zeros(len(start), bool),
        )

    def _rewind(self, rows: Decided) -> None:
        """Return to the states before `rows`, the last of their environments."""
        self._core_state[torch.from_numpy(rows.ids)] = rows.core_state
        self._previous_action[rows.ids] = rows.fields["previous_action"]
        for path, stacker in self._stackers.items():
            stacker.rewind(rows.ids, rows.prefix[f"prefix:{path}"])

    def _restart(self, ids: npt.NDArray[np.intp], run_ids: npt.NDArray[np.int64]) -> None:
        self.restarts += int((self._run_id[ids] >= 0).sum())
        self._run_id[ids] = run_ids
        self._core_state[torch.from_numpy(ids)] = 0
        self._previous_action[ids] = 0

    @torch.no_grad()
    def _evaluate(
        self,
        ids: npt.NDArray[np.intp],
        observation: dict[str, npt.NDArray[np.generic]],
        reward: npt.NDArray[np.float32],
        *,
        terminated: npt.NDArray[np.bool_],
        start: npt.NDArray[np.bool_],
        final: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.generic]:
        seen, prefix = dict(observation), {}
        for path, stacker in self._stackers.items():
            seen[path] = stacker.push(ids, observation[path], start)
            prefix[f"prefix:{path}"] = seen[path][:, :-1]
        previous_action = self._previous_action[ids]
        index = torch.from_numpy(ids)
        before = self._core_state[index]
        out = self._forward.act(
            seen,
            {"reward": reward, "previous_action": previous_action, "start": start},
            before,
            None if self._epsilon is None else self._epsilon[index],
        )
        action: npt.NDArray[np.generic] = out.action.cpu().numpy()
        if not final.any():
            self._core_state[index] = out.core_state
            self._previous_action[ids] = action
        fields: dict[str, npt.NDArray[np.generic]] = {
            "reward": reward,
            "terminated": terminated,
            "start": start,
            "final": final,
            "previous_action": previous_action,
            "action": action,
            "policy_version": np.full(len(ids), self.version, np.int64),
        }
        fields |= {f"obs:{path}": leaf for path, leaf in observation.items()}
        self._keep(Decided(ids, fields, before, prefix), out.behaviour)
        return action

    def _keep(self, decided: Decided, behaviour: dict[str, torch.Tensor]) -> None:
        """Called with all rows that were evaluated; here nothing is kept of them."""


class ActingPolicy(Policy):
    """A policy that also assembles unrolls of what it did.

    `act` gives the actions; `record`, called after they were sent, does the bookkeeping.

    Args:
      brain: network and acting rule.
      env: the environment's spec.
      layout: the unroll message.
      unroll_steps: T.
      env_ids: `<int64>[N]` global environment ids.
      device: where the network lives.
      precision: autocast of the forward pass.
      seed: of the action sampling.
      exploration: of the N environments; evaluation environments leave no unrolls.
      graphs: use CUDA graphs where `device` is a GPU.

    Attributes:
      idle_rows: rows that were acted for training and left out of every unroll.
      env_ids: `<int64>[N]`.
      sink: also gets every row, in `record`; none at first.
    """

    def __init__(
        self,
        brain: Brain,
        env: EnvSpec,
        layout: Layout,
        unroll_steps: int,
        env_ids: npt.NDArray[np.int64],
        device: torch.device,
        precision: str,
        seed: int,
        exploration: Exploration | None = None,
        graphs: bool = True,
    ):
        epsilon = None if exploration is None else exploration.epsilon
        super().__init__(
            brain, env, len(env_ids), device, precision, seed, epsilon=epsilon, graphs=graphs
        )
        window = brain.window
        self._store = UnrollStore(
            layout,
            unroll_steps,
            env_ids,
            window.burn_in_steps if window else 0,
            window.cross_episodes if window else True,
        )
        self._priorities = InitialPriorities(brain, layout, len(env_ids)) if window else None
        self.evaluation = (
            np.zeros(len(env_ids), bool) if exploration is None else exploration.evaluation
        )
        self._decided: list[Decided] = []
        self.idle_rows = 0
        self.env_ids = env_ids
        self.sink: RowSink | None = None

    def _restart(self, ids: npt.NDArray[np.intp], run_ids: npt.NDArray[np.int64]) -> None:
        super()._restart(ids, run_ids)
        self._store.discard(ids, run_ids)

    def _keep(self, decided: Decided, behaviour: dict[str, torch.Tensor]) -> None:
        for name, value in behaviour.items():
            decided.fields[f"behaviour:{name}"] = value.cpu().numpy()
        self._decided.append(decided)

    def record(self) -> list[npt.NDArray[np.uint8]]:
        """Append the decided rows; return the unrolls that are complete, `<uint8>[n, nbytes]`."""
        complete = []
        for decided in self._decided:
            self._show(decided)
            ids, fields, core_state, prefix = self._owed(decided)
            ids = self._store.append(ids, fields, core_state.cpu().numpy(), prefix)
            if len(ids):
                unrolls = self._store.take(ids)
                if self._priorities:
                    self._priorities.fill(ids, unrolls)
                complete.append(unrolls)
                self._completed(ids)
        self._decided.clear()
        return complete

    def _show(self, decided: Decided) -> None:
        if self.sink is not None:
            self.sink.add(decided.ids, decided.fields)

    def _owed(self, decided: Decided) -> Decided:
        """Return the rows that unrolls keep: those of training environments."""
        keep = ~self.evaluation[decided.ids]
        return decided if keep.all() else decided.of(keep)

    def _completed(self, ids: npt.NDArray[np.intp]) -> None:
        """Called with the environments that have completed an unroll."""
