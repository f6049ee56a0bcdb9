"""Asynchronous advantage actor-critic: A3C, Mnih et al. 2016, arXiv:1602.01783."""
