"""R2D2: recurrent Q-learning from sequences, Kapturowski et al. 2019, ICLR."""
