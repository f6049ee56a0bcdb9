"""Ape-X DQN: Q-learning from prioritized transitions, Horgan et al. 2018, arXiv:1803.00933."""
