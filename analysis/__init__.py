"""Questions about runs: one script each, and a reader for notebooks.

Needs h5py, numpy, pandas, matplotlib, Pillow and PyYAML; no MPI, no torch, no display.
"""
