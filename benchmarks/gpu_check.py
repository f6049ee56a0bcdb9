"""The whole CUDA path in one run of under five minutes: what works, is it right, how fast is it.

    python benchmarks/gpu_check.py --json benchmarks/results/gpu_check.json
    python benchmarks/gpu_check.py --device cpu --quick CONFIG     # the same code without a GPU

- agreement: outputs of the network, losses and parameters after some steps, on the device and on
  the CPU, in float32 and under autocast; and acting with and without CUDA graphs.
- acting: rows/s of the policy (pinned staging, graph, copies back) over the bare network's.
- learning: steps/s of the trainer (pinned staging, copies beside the computation, flat optimizer)
  over a bare loop's that has its batch on the device, by precision and micro-batches.
- jobs: real runs of synthetic environments with inference and learner on this one GPU, and with two
  learners by torch.distributed (NCCL refuses two ranks on one GPU: that is reported, no fault).
- stage_costs: for `hpcrl bench project --gpu-costs`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from hpcrl.acting.forward import BucketedForward, make_forward
from hpcrl.acting.policy import ActingPolicy
from hpcrl.bench.costs import acting_policy, noise, random_batch
from hpcrl.brain import Brain, autocast
from hpcrl.comm.wire import unroll_layout
from hpcrl.config.load import load_config
from hpcrl.job import LEARNER_STAGES
from hpcrl.learning.data_parallel import SingleLearner
from hpcrl.learning.trainer import Trainer
from hpcrl.node.staging import Staging
from hpcrl.specs import EnvSpec
from hpcrl.timing import StageTimer
from hpcrl.types import NetInputs

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent
PIXELS = {"observation_shape": [84, 84], "frame_stack": 4, "episode_length": 200, "num_actions": 6}
RELATIVE = {"float32": 2e-3, "bfloat16": 5e-2, "float16": 2e-2}
"""Largest relative difference of a result from float32 on the CPU. TF32 has ten bits."""


class Case:
    """The configuration with a synthetic environment of images, without an emulator."""

    def __init__(self, path, device, seconds):
        self.device, self.seconds = device, seconds
        self.config = load_config(path, ["--stop.agent_steps", "1000"])
        self.env = self.spec()
        self.brain = Brain(self.config, self.env)

    def spec(self):
        from env_wrappers import describe

        return EnvSpec.from_json(describe("synthetic:counting", PIXELS))

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds_per_call(self, call):
        """Median over chunks, each ended by a synchronization."""
        for _ in range(3):
            call()
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        chunk = max(1, int(self.seconds / 10 / max(time.perf_counter() - start, 1e-6)))
        times: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(times) < 3 or time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(chunk):
                call()
            self.synchronize()
            times.append((time.perf_counter() - start) / chunk)
        return float(np.median(times))

    def inputs(self, rows, device):
        """Rows of noise as the network takes them."""
        shape = (rows, 4, 84, 84)
        frames = torch.from_numpy(noise(shape, "uint8"))[None].to(device)
        zeros = torch.zeros(1, rows, device=device)
        action = torch.zeros(1, rows, 1, dtype=torch.int32, device=device)
        return NetInputs({"obs": frames}, zeros, action, zeros.bool())

    def network(self, device):
        return self.brain.make_network(0).to(device)


def worst(ours, reference):
    """Largest difference over the largest value."""
    ours, reference = (np.asarray(a.detach().float().cpu()) for a in (ours, reference))
    return float(np.abs(ours - reference).max() / max(np.abs(reference).max(), 1e-6))


def acting_agreement(case):
    """Outputs of the network against float32 on the CPU, and of graphs against none."""
    found = {}
    inputs, rows = case.inputs(64, CPU), 64
    net = case.network(CPU).eval()
    with torch.no_grad():
        reference = net(inputs, net.initial_state(rows))[0]
        for precision in RELATIVE:
            device_net = case.network(case.device).eval()
            with autocast(precision, case.device):
                out = device_net(case.inputs(rows, case.device), device_net.initial_state(rows))[0]
            difference = worst(out.policy, reference.policy)
            found[f"policy_{precision}"] = {
                "relative": difference,
                "ok": difference <= RELATIVE[precision],
            }
    found["buckets"] = bucket_agreement(case)
    return found


def bucket_agreement(case):
    """Greedy actions and values by batches of several sizes, with and without buckets."""
    net = case.network(case.device).eval()
    generator = torch.Generator(case.device).manual_seed(0)
    arguments = (case.brain, net, case.device, "float32", generator, True)
    plain, graphed = make_forward(*arguments, graphs=False), bucketed(case, arguments)
    differences = []
    for rows in (5, 64, 40, 100):
        observation = {"obs": noise((rows, 4, 84, 84), "uint8")}
        fields = {
            "reward": np.zeros(rows, np.float32),
            "previous_action": np.zeros((rows, 1), np.int32),
            "start": np.zeros(rows, bool),
        }
        state = net.initial_state(rows)
        one = plain.act(observation, fields, state, None)
        other = graphed.act(observation, fields, state, None)
        differences.append(worst(other.behaviour["value"], one.behaviour["value"]))
    difference = max(differences)
    return {"relative": difference, "ok": difference <= RELATIVE["float32"]}


def bucketed(case, arguments):
    """CUDA graphs on a GPU; on a CPU the same buckets, computed as they are."""
    if case.device.type == "cuda":
        return make_forward(*arguments)
    return BucketedForward(*arguments, capture=lambda compute, generator: compute)


def training_agreement(case, steps=5):
    """Losses and parameters after some steps from the same weights and batches."""
    found = {}
    unrolls = min(case.config.learner.batch_unrolls, 8)
    batch = random_batch(case.config, case.env, case.brain, unrolls)
    reference = train(case, CPU, "float32", 1, batch, steps)
    for precision in RELATIVE:
        for parts in (1, 4):
            losses, moved = train(case, case.device, precision, parts, batch, steps)
            loss = float(np.max(np.abs(losses - reference[0]) / np.abs(reference[0]).max()))
            away = worst(moved, reference[1])
            # A scaled step of float16 may be skipped at first, so its later losses are others.
            ok = precision == "float16" or loss <= 4 * RELATIVE[precision]
            found[f"{precision}, {parts} parts"] = {
                "loss_relative": loss,
                "parameters_relative": away,
                "ok": bool(ok and np.isfinite(losses).all()),
            }
    return found


def trainer_of(case, device, precision, parts, compiled=False):
    from dataclasses import replace

    config = replace(
        case.config.learner, precision=precision, micro_batches=parts, compile=compiled
    )
    return Trainer(case.brain, config, SingleLearner(), device, 2**62, seed=0)


def train(case, device, precision, parts, batch, steps):
    trainer = trainer_of(case, device, precision, parts)
    before = trainer.flat.value.clone()
    timer = StageTimer(LEARNER_STAGES)
    losses = [trainer.step(batch, version, 0, timer).values["loss"] for version in range(steps)]
    return np.array(losses), trainer.flat.value - before


def acting_rates(case, sizes):
    """Rows per second of the bare network and of the policy around it."""
    found = {}
    for precision in ("float32", "bfloat16"):
        for rows in sizes:
            bare_s = bare_acting(case, precision, rows)
            policy_s, graphs_off_s = (
                policy_seconds(case, precision, rows, g) for g in (True, False)
            )
            found[f"{precision}, {rows} rows"] = {
                "bare_rows_per_s": rows / bare_s,
                "policy_rows_per_s": rows / policy_s,
                "policy_without_graphs_rows_per_s": rows / graphs_off_s,
                "ratio": bare_s / policy_s,
            }
    return found


def bare_acting(case, precision, rows):
    net, inputs = case.network(case.device).eval(), case.inputs(rows, case.device)
    state = net.initial_state(rows)

    @torch.no_grad()
    def once():
        with autocast(precision, case.device):
            net(inputs, state)

    return case.seconds_per_call(once)


def policy_seconds(case, precision, rows, graphs):
    _, batch = acting_policy(case.config, case.env, rows)
    steps = case.config.learner.unroll_steps
    size = case.network(CPU).state_size
    layout = unroll_layout(case.env, case.brain.behaviour, steps, size)
    ids = np.arange(rows)
    settings = (case.brain, case.env, layout, steps, ids, case.device, precision)
    policy = ActingPolicy(*settings, seed=0, graphs=graphs)

    def once():
        policy.act(batch)
        policy.record()

    return case.seconds_per_call(once)


def learning_rates(case):
    """Steps per second of the trainer and of a loop whose batch is on the device already."""
    found = {}
    unrolls = case.config.learner.batch_unrolls
    batch = random_batch(case.config, case.env, case.brain, unrolls)
    timer = StageTimer(LEARNER_STAGES)
    for precision in RELATIVE:
        bare_s = bare_learning(case, precision, batch)
        for parts in (1, 4):
            trainer = trainer_of(case, case.device, precision, parts)
            ours_s = case.seconds_per_call(lambda t=trainer: t.step(batch, 0, 0, timer))
            found[f"{precision}, {parts} parts"] = {
                "bare_steps_per_s": 1 / bare_s,
                "steps_per_s": 1 / ours_s,
                "ratio": bare_s / ours_s,
            }
    if case.device.type == "cuda":
        found["bfloat16, compiled"] = compiled_rate(case, batch, timer)
    return found


def compiled_rate(case, batch, timer):
    """Steps per second with torch.compile, or why there are none."""
    trainer = trainer_of(case, case.device, "bfloat16", 1, compiled=True)
    try:
        return {"steps_per_s": 1 / case.seconds_per_call(lambda: trainer.step(batch, 0, 0, timer))}
    except Exception as error:  # the compiler's own kinds of failure are many
        return {"message": f"{type(error).__name__}: {error}"[:500]}


def bare_learning(case, precision, batch):
    net = case.network(case.device).train()
    optimizer = torch.optim.Adam(net.parameters(), fused=case.device.type == "cuda" or None)
    generator = torch.Generator(case.device)
    staging = Staging(case.device)
    from hpcrl.learning.batches import part

    there = part(batch, 0, batch.reward.shape[1], staging)
    staging.join()

    def once():
        optimizer.zero_grad()
        with autocast(precision, case.device):
            out = case.brain.loss(net, there, generator)
        (out.loss_sum / out.count).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 40.0)
        optimizer.step()

    return case.seconds_per_call(once)


def job(case, path, options, seconds):
    """Train for some seconds; return the exit code and the last rates."""
    environment = dict(os.environ)
    if case.device.type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "hpcrl", "train", str(path), "--run.dir", str(run)]
        command += ["--env.name", "synthetic:counting", "--env.options", json.dumps(PIXELS)]
        command += ["--stop.wall_time_s", str(seconds), "--stop.frames", "0"]
        command += ["--stop.agent_steps", "0", "--learner.optimizer.schedule", "constant"]
        command += ["--metrics.every_s", "1", "--metrics.tensorboard", "false"]
        command += ["--checkpoint.every_s", "0", "--topology.allow_gpu_sharing", "true", *options]
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds + 90,
                check=False,
                cwd=ROOT,
            )
        except subprocess.TimeoutExpired:
            return {"exit_code": None, "message": "took too long"}
        found = {"exit_code": done.returncode}
        if done.returncode:
            return {**found, "message": done.stderr[-1500:]}
        lines = (run / "metrics.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        names = ("env_steps_per_s", "batch_rows", "policy_lag", "learner_steps_per_s")
        gpus = [rank["gpu"] for rank in json.loads((run / "topology.json").read_text())["ranks"]]
        return {**found, **{name: last.get(name) for name in names}, "gpus": gpus}


def jobs(case, path, seconds):
    acting = ["--topology.actors", "4", "--topology.inference", "1"]
    one = job(case, path, ["--topology.learners", "1", *acting], seconds)
    both = ["--inference.precision", "bfloat16", "--learner.precision", "bfloat16"]
    half = job(case, path, ["--topology.learners", "1", *acting, *both], seconds)
    acting[-1] = "2"
    two = ["--topology.learners", "2", *acting, "--learner.backend", "torch"]
    return {
        "one learner, float32": one,
        "one learner, bfloat16": half,
        "two learners, torch.distributed": job(case, path, two, seconds),
    }


def stage_costs(case, acting, learning, sizes):
    """What `hpcrl bench project --gpu-costs` takes: a batch of actions on a line, and a step."""
    few, many = sizes[0], sizes[-1]
    few_s, many_s = (
        rows / acting[f"float32, {rows} rows"]["policy_rows_per_s"] for rows in (few, many)
    )
    row_s = max((many_s - few_s) / (many - few), 0.0)
    flat = trainer_of(case, case.device, "float32", 1).flat.value
    copy = torch.empty(flat.shape)
    return {
        "act_batch_s": max(few_s - few * row_s, 0.0),
        "act_row_s": row_s,
        "train_s": 1 / learning["float32, 1 parts"]["steps_per_s"],
        "weights_s": case.seconds_per_call(lambda: flat.copy_(copy)),
    }


def agreed(found):
    """Whether every comparison of a tree of results is within its tolerance."""
    if isinstance(found, dict):
        return all(agreed(v) if k != "ok" else v for k, v in found.items())
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", nargs="?", default=str(ROOT / "configs" / "breakout_vtrace.yaml"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="few sizes, short runs")
    parser.add_argument("--no-jobs", action="store_true", help="no runs of several ranks")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_check: torch sees no CUDA device here; --device cpu runs the same", file=sys.stderr
        )
        return 2
    device = torch.device("cuda", 0) if arguments.device == "cuda" else CPU
    case = Case(arguments.config, device, 0.05 if arguments.quick else 1.0)
    sizes = (8, 32) if arguments.quick else (16, 64, 256, 1024)
    acting, learning = acting_rates(case, sizes), learning_rates(case)
    results = {
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "agreement": {
            "acting": acting_agreement(case),
            "training": training_agreement(case, 2 if arguments.quick else 5),
        },
        "acting": acting,
        "learning": learning,
        "stage_costs": stage_costs(case, acting, learning, sizes),
    }
    if not arguments.no_jobs:
        results["jobs"] = jobs(case, arguments.config, 4 if arguments.quick else 20)
    results["ratio"] = learning["float32, 1 parts"]["ratio"]
    results["agrees"] = agreed(results["agreement"])
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    failed = [name for name, one in results.get("jobs", {}).items() if one["exit_code"] != 0]
    # Where NCCL refuses two learners on one GPU, nothing of hpcrl has failed.
    failed = [name for name in failed if "two" not in name or device.type == "cpu"]
    for name in failed:
        print(f"gpu_check: the job of {name} failed", file=sys.stderr)
    return int(not results["agrees"] or bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
