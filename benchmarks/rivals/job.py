"""What all rivals have in common: the job, and how its rate is measured. Plain Python, any version.

A rival's script gets the job as JSON in its first argument and prints one line of JSON last.
"""

# mypy: ignore-errors
import json
import sys
import threading
import time

DEFAULTS = {
    "game": "Breakout",
    "unroll": 20,
    "batch": 640,
    "envs": 32,
    "workers": 2,
    "threads": 1,
    "warm_up_s": 20.0,
    "seconds": 60.0,
}


def read_job():
    return {**DEFAULTS, **json.loads(sys.argv[1])} if len(sys.argv) > 1 else dict(DEFAULTS)


class Meter:
    """Counts the agent steps that were trained on, once each, between warm-up and end."""

    def __init__(self, job):
        self._warm_up_s, self._seconds = job["warm_up_s"], job["seconds"]
        self._start_s = time.monotonic()
        self._first = self._last = None

    def note(self, trained_steps):
        """Take the total so far; return whether the time is over."""
        now_s = time.monotonic()
        if now_s - self._start_s >= self._warm_up_s:
            self._last = (now_s, trained_steps)
            self._first = self._first or self._last
        return now_s - self._start_s >= self._warm_up_s + self._seconds

    def rate(self):
        if self._first is None or self._last == self._first:
            raise SystemExit("the run ended before it was measured")
        return (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])

    def watch(self, total, stop):
        """Note `total()` once a second in a thread, for programs whose loop is not ours.

        `stop` is called when the time is over.
        """

        def look():
            while not self.note(total()):
                time.sleep(1.0)
            stop()

        threading.Thread(target=look, daemon=True).start()


def report(name, version, meter, **more):
    print(json.dumps({"name": name, "version": version, "steps_per_s": meter.rate(), **more}))


def make_env(game):
    """One emulator as all of them play it: no sticky actions, a lost life ends the episode."""
    import ale_py
    import gymnasium as gym
    import numpy as np
    from gymnasium import wrappers

    if hasattr(gym, "register_envs"):
        gym.register_envs(ale_py)
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4, terminal_on_life_loss=True)
    if hasattr(wrappers, "FrameStackObservation"):
        env = wrappers.FrameStackObservation(env, 4)
    else:
        env = wrappers.TransformObservation(wrappers.FrameStack(env, 4), np.asarray)
    return wrappers.TransformReward(env, np.sign)
