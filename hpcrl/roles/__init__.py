"""One file and one loop per role."""
