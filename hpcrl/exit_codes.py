"""Exit codes of every hpcrl process; batch scripts act on them."""

DONE = 0
"""The run met a stop condition."""
USAGE = 2
"""Bad configuration or usage: running it again as it is fails again."""
INTERNAL = 70
"""An error inside the job; the last good checkpoint is intact."""
LAUNCH = 71
"""The ranks don't form the job that was asked for: launcher, MPI library or fabric."""
ENVIRONMENTS = 72
"""The environments failed more often than `env.max_restarts_per_hour` allows."""
STORAGE = 74
"""The run directory can't be written; the last good checkpoint is intact."""
REQUEUE = 75
"""Stopped by a signal or at the wall limit with a durable checkpoint: start me again."""
