"""Prioritized replay, one shard per learner rank: numpy only, communicates with nobody."""
