"""RLlib's IMPALA or APPO with a learner in the driver, on the job of `job.py`.

rllib.py JOB impala | appo
"""

import sys

import ray
from job import Meter, make_env, read_job, report
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.registry import register_env

NATURE = DefaultModelConfig(
    conv_filters=[[32, 8, 4], [64, 4, 2], [64, 3, 1]],
    conv_activation="relu",
    head_fcnet_hiddens=[512],
    head_fcnet_activation="relu",
    vf_share_layers=True,
)


def make(env_config):
    """RLlib's convolutions take channels last, in floating point."""
    import gymnasium as gym
    import numpy as np

    env = make_env(env_config["game"])
    space = gym.spaces.Box(0.0, 1.0, (84, 84, 4), np.float32)

    def last(observation):
        return np.moveaxis(observation, 0, -1).astype(np.float32) / 255.0

    return gym.wrappers.TransformObservation(env, last, space)


def main():
    job, algorithm = read_job(), sys.argv[2] if len(sys.argv) > 2 else "impala"
    ray.init(num_cpus=job["workers"] + 1, include_dashboard=False, configure_logging=False)
    register_env("job", make)
    config = APPOConfig() if algorithm == "appo" else IMPALAConfig()
    config = (
        config.environment("job", env_config={"game": job["game"]})
        .env_runners(
            num_env_runners=1,
            num_envs_per_env_runner=job["envs"],
            rollout_fragment_length=job["unroll"],
            compress_observations=False,
        )
        .learners(num_learners=0)
        .rl_module(model_config=NATURE)
        .training(train_batch_size_per_learner=job["batch"], lr=5e-4)
    )
    built = config.build_algo()
    meter = Meter(job)
    over = False
    while not over:
        learners = built.train().get("learners", {})
        trained = learners.get("__all_modules__", {}).get("num_env_steps_trained_lifetime", 0)
        over = meter.note(trained)
    built.stop()
    ray.shutdown()
    report(f"RLlib {algorithm.upper()}", ray.__version__, meter)


if __name__ == "__main__":
    main()
