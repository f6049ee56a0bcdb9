"""The life of a run: its directory, checkpoints, metrics, stops, failures, and what they say."""
