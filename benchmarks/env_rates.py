"""Each family's stepping rate through an actor against its own bare loop.

    python -m benchmarks.env_rates --json benchmarks/results/env_rates.json [KEY...]

Two ranks per family: rank 1 does what an actor does with two groups of environments, by the actor's
own code (`EnvBatch`, `GroupChannel`), rank 0 answers at once with random actions. Then rank 1 steps
as many environments in a plain loop over the package's own API, and so on by turns; the ratio is
the median over the turns. `cpu_ratio` is that of the processor time of a step, without the wait for
the answer: other work on the machine doesn't touch it, while on a busy machine the wait is most of
`ratio`. A family with an interpreter of its own is stepped in child processes, whose processor time
isn't seen, and its bare loop runs in that interpreter by itself.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np

import env_wrappers
from benchmarks.bare_envs import BareSingles, run_bare
from env_wrappers import IsolatedBatch, Isolation
from env_wrappers.families import FAMILIES
from hpcrl.bench.ranks import BenchError, read_arguments, run_ranks, write_result
from hpcrl.comm.slots import Client, StepSlots
from hpcrl.comm.transport import MpiLink
from hpcrl.job import ACTOR_STAGES
from hpcrl.roles.actor import GroupChannel
from hpcrl.specs import EnvSpec
from hpcrl.start.environments import random_actions
from hpcrl.timing import choose_wait_policy
from tests.env_wrappers.conformance import own_python

ROOT = Path(__file__).resolve().parent.parent
GROUPS = 2
NUM_ENVS = 32
"""Environments of a group, but for families that step many within a millisecond."""
MANY_ENVS = {"gym": 128, "minatar": 256, "gymnax": 1024}


def open_slots(link, spec, rows):
    """Slots for both groups, how to wait for them, and actions to answer with."""
    clients = [Client(1, group) for group in range(GROUPS)]
    slots = StepSlots(link, spec, clients, rows, len(ACTOR_STAGES), 1, 0.0)
    waiter = link.waiter(lambda: "the server waited for steps")
    rng = np.random.default_rng(0)
    actions = [random_actions(spec.action, rows, rng) for _ in range(64)]
    return slots, waiter, actions


def answer_for(served, seconds):
    """Answer for so long."""
    slots, waiter, actions = served
    answered, end_s = 0, time.perf_counter() + seconds
    while answered < 4 * GROUPS or time.perf_counter() < end_s:
        slots.poll()
        if not slots.due():
            waiter.idle()
            continue
        waiter.progress()
        taken = slots.take()
        places = slots.rows(taken)[1]
        chosen = np.concatenate([actions[(answered + i) % 64] for i in range(len(taken))])
        slots.reply(taken, places, chosen[places])
        answered += len(taken)


def act(link, batches, spec, rows):
    """What an actor does until it is told to stop.

    Returns (seconds, processor seconds without waiting, steps).
    """
    channels = [GroupChannel(link, spec, 0, group, rows, 0) for group in range(GROUPS)]
    timers = dict.fromkeys(ACTOR_STAGES, 0.0)
    for batch, channel in zip(batches, channels, strict=True):
        step = batch.reset()
        channel.pack(step, timers, batch.failures)
        channel.send(step)
    steps, spent_s, start_s = 0, 0.0, time.perf_counter()
    live = list(zip(batches, channels, strict=True))
    while live:
        for batch, channel in tuple(live):
            actions = channel.receive()
            if actions is None:
                live.remove((batch, channel))
                continue
            begin_s = time.process_time()
            step = batch.step(actions)
            channel.pack(step, timers, batch.failures)
            channel.send(step)
            spent_s += time.process_time() - begin_s
            steps += rows
    found = time.perf_counter() - start_s, spent_s, steps
    for channel in channels:
        channel.close()
    return found


class BareVector:
    """The package's own vector environment, which resets itself."""

    def __init__(self, batch):
        self.envs, codec = batch._envs, batch._actions
        batch.reset()
        rng = np.random.default_rng(0)
        action = EnvSpec.from_json(batch.spec).action
        drawn = [random_actions(action, batch.num_envs, rng) for _ in range(64)]
        self.actions = [codec.decode(actions) for actions in drawn]
        self.batch, self.steps = batch, 0

    def step(self):
        self.envs.step(self.actions[self.steps % 64])
        self.steps += 1

    def close(self):
        self.batch.close()


class BareAgents:
    """PettingZoo's dictionaries."""

    def __init__(self, batch):
        self.batch = batch
        batch.reset()
        self.envs, self.steps = batch._envs, 0
        for env in self.envs:
            env.reset()
        self.actions = [
            {agent: env.action_space(agent).sample() for agent in env.possible_agents}
            for env in self.envs
        ]

    def step(self):
        for env, actions in zip(self.envs, self.actions, strict=True):
            env.step({agent: actions[agent] for agent in env.agents})
            if not env.agents:
                env.reset()

    def close(self):
        self.batch.close()


def bare_loop(family, name, options, rows):
    """The family's own loop over `rows` rows; None where it is ours alone."""
    if family.key == "pettingzoo":
        return BareAgents(env_wrappers.make(name, rows, range(rows), options))
    if env_wrappers.make_env(name, options) is not None:
        return BareSingles(name, options, rows)
    batch = env_wrappers.make(name, rows, range(rows), options)
    return BareVector(batch)


def make_group(name, rows, options, python):
    """One group's environments, in a child process where they have an interpreter of their own."""
    if python:
        isolation = Isolation(python, 60.0, 120.0, 0)
        return IsolatedBatch(name, rows, range(rows), options, isolation)
    return env_wrappers.make(name, rows, range(rows), options)


def run_bare_in(python, key, rows, seconds):
    """`run_bare` in another interpreter."""
    program = [python, "-m", "benchmarks.bare_envs", key, *map(str, (GROUPS, rows, seconds))]
    done = subprocess.run(program, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def rank_main():
    """One family on two ranks."""
    arguments = read_arguments()
    family = next(family for family in FAMILIES if family.key == arguments["key"])
    name, options = f"{family.name}:{family.example}", dict(family.example_options)
    rows = MANY_ENVS.get(family.key, NUM_ENVS) * family.rows_per_env
    seconds = arguments["seconds"]
    link = MpiLink(deadline_s=120.0, max_message_bytes=2**30)
    python = arguments["python"]
    processes = link.size + (GROUPS if python else 0)
    link.wait_policy = choose_wait_policy("auto", processes, arguments["cores"])
    batches = [make_group(name, rows, options, python) for _ in range(GROUPS)]
    spec = EnvSpec.from_json(batches[0].spec)
    if python:
        bare = partial(run_bare_in, python, family.key, rows)
    elif link.rank:
        loops = [bare_loop(family, name, options, rows) for _ in range(GROUPS)]
        bare = partial(run_bare, loops, rows)
    turns: dict[str, list] = {"actor": [], "bare": []}
    both = link.group(range(2))
    for _ in range(arguments["turns"]):
        both.barrier()
        if link.rank == 0:
            served = open_slots(link, spec, rows)
            answer_for(served, seconds)
            served[0].stop(link)
            served[0].close()
            time.sleep(seconds)  # the other core is the bare loop's, too
        else:
            turns["actor"].append(act(link, batches, spec, rows))
            turns["bare"].append(bare(seconds))
    for batch in batches:
        batch.close()
    if link.rank:
        rates = {kind: [n / s for s, _, n in found] for kind, found in turns.items()}
        spent = {kind: [cpu / n for _, cpu, n in found] for kind, found in turns.items()}
        ratios = [a / b for a, b in zip(rates["actor"], rates["bare"], strict=True)]
        cpu_ratios = [b / a for a, b in zip(spent["actor"], spent["bare"], strict=True)]
        write_result(
            arguments,
            {
                "environment": name,
                "rows": rows,
                "actor_steps_per_s": round(statistics.median(rates["actor"])),
                "bare_steps_per_s": round(statistics.median(rates["bare"])),
                "ratio": round(statistics.median(ratios), 3),
                "cpu_ratio": None if python else round(statistics.median(cpu_ratios), 3),
            },
        )


def main() -> None:
    """Measure the families that are installed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", nargs="*", help="families; all installed ones if absent")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=7)
    options = parser.parse_args()
    figures = {}
    for family in FAMILIES:
        wanted = family.key in options.keys if options.keys else family.key != "synthetic"
        installed = family.versions() is not None
        python = "" if installed else own_python(family)
        if not wanted or not family.example or not (installed or python):
            continue
        arguments = {
            "key": family.key,
            "python": python,
            "seconds": options.seconds,
            "turns": options.turns,
            "cores": len(os.sched_getaffinity(0)),
        }
        try:
            figures[family.key] = run_ranks(["-m", "benchmarks.env_rates"], 2, arguments, 300.0)
        except BenchError as error:
            print(f"{family.key}: {error}", file=sys.stderr)
            continue
        print(f"{family.key:12} {json.dumps(figures[family.key])}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    rank_main() if "OMPI_COMM_WORLD_RANK" in os.environ else main()
