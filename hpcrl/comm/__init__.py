"""How ranks talk: the link over MPI, every message on it, and the protocols of each plane."""
