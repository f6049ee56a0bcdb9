"""Ways into a run: the local launch, one rank's start, batch scripts, checks beforehand."""
