"""Sample Factory's asynchronous APPO with V-trace, one epoch, on the job of `job.py`."""

import tempfile
from importlib.metadata import version

from job import Meter, make_env, read_job, report
from sample_factory.algo.learning.learner import Learner
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

# Its summaries of training (2.1.1) ask for advantages, which V-trace has none of.
Learner._should_save_summaries = lambda self: False


def make(full_env_name, cfg=None, env_config=None, render_mode=None):
    return make_env(full_env_name)


def options(job, folder):
    chosen = {
        "env": job["game"],
        "experiment": "rate",
        "train_dir": folder,
        "restart_behavior": "overwrite",
        "device": "cpu",
        "seed": 1,
        "async_rl": True,
        "serial_mode": False,
        "batched_sampling": False,
        "num_workers": job["workers"],
        "num_envs_per_worker": job["envs"] // job["workers"],
        "worker_num_splits": 2,
        "policy_workers_per_policy": 1,
        "rollout": job["unroll"],
        "recurrence": job["unroll"],
        "use_rnn": False,
        "batch_size": job["batch"],
        "num_batches_per_epoch": 1,
        "num_epochs": 1,
        "with_vtrace": True,
        "normalize_input": False,
        "normalize_returns": False,
        "obs_scale": 255.0,
        "encoder_conv_architecture": "convnet_atari",
        "encoder_conv_mlp_layers": 512,
        "nonlinearity": "relu",
        "env_frameskip": 1,
        "env_framestack": 1,
        "train_for_env_steps": 10**10,
        "save_every_sec": 10**6,
        "set_workers_cpu_affinity": False,
        "force_envs_single_thread": True,
    }
    return [f"--{name}={value}" for name, value in chosen.items()]


def main():
    job = read_job()
    register_env(job["game"], make)
    with tempfile.TemporaryDirectory() as folder:
        arguments = options(job, folder)
        parser, _ = parse_sf_args(argv=arguments)
        _, runner = make_runner(parse_full_cfg(parser, arguments))
        meter = Meter(job)
        runner.init()
        # The learner's own counter of what it has trained on.
        meter.watch(
            lambda: sum(runner.env_steps.values()),
            lambda: setattr(runner.cfg, "train_for_env_steps", 0),
        )
        runner.run()
        report("Sample Factory APPO", version("sample-factory"), meter)


if __name__ == "__main__":
    main()
