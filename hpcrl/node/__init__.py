"""What a rank finds on its node: launcher variables, cores, memory, GPUs."""
