"""hpcrl: distributed reinforcement learning as one MPI job. Importing it starts nothing."""

__version__ = "0.1.0"
