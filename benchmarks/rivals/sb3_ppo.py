"""Stable-Baselines3 PPO with one epoch and one minibatch, on the job of `job.py`."""

import os

import stable_baselines3
import torch
from job import Meter, make_env, read_job, report
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import SubprocVecEnv


class Clock(BaseCallback):
    """Counts when a rollout begins: what was collected before it has been trained on."""

    def __init__(self, meter):
        super().__init__()
        self.meter, self.over = meter, False

    def _on_rollout_start(self):
        self.over = self.meter.note(self.num_timesteps)

    def _on_step(self):
        return not self.over


def main():
    job = read_job()
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    torch.set_num_threads(job["threads"])
    steps = job["batch"] // job["envs"]
    envs = SubprocVecEnv([lambda: make_env(job["game"])] * job["envs"], start_method="forkserver")
    model = PPO("CnnPolicy", envs, n_steps=steps, batch_size=job["batch"], n_epochs=1, device="cpu")
    meter = Meter(job)
    model.learn(10**9, callback=Clock(meter))
    report("Stable-Baselines3 PPO", stable_baselines3.__version__, meter)
    envs.close()


if __name__ == "__main__":
    main()
