"""From unrolls to parameters: batches, sources, optimizers, sums over the learners."""
