"""Optimiser steps on N learners, with every backend named on the command line in turn.

World rank 0 is no learner. Learner 0 prints a JSON object per backend: its name and the
parameters after the last step.
"""

import json
import os
import sys

from hpcrl.comm.transport import MpiLink

link = MpiLink(deadline_s=100.0, max_message_bytes=1 << 30)
everyone = link.group(range(link.size))
group = link.group(range(1, link.size))


def train(parallel, seed: int):
    """Return the parameters and the last step's number of rows that count."""
    import torch
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    from hpcrl.learning.data_parallel import check_in_sync
    from tests.oracles import big_batch

    net = big_batch.network(seed)
    params = list(net.parameters())
    flat = parameters_to_vector(params).detach()
    parallel.broadcast_(flat)
    vector_to_parameters(flat, params)
    optimizer = big_batch.optimizer_of(net)
    share = big_batch.GLOBAL_BATCH // parallel.size
    rows = slice(share * parallel.rank, share * (parallel.rank + 1))
    for step, (inputs, targets, counted) in enumerate(big_batch.batches(), start=1):
        optimizer.zero_grad()
        big_batch.loss_sum(net, inputs[rows], targets[rows], counted[rows]).backward()
        gradients = [p.grad.reshape(-1) for p in params]
        buffer = torch.cat([*gradients, counted[rows].sum()[None].float()])
        parallel.sum_(buffer)
        vector_to_parameters(buffer[:-1] / buffer[-1], [p.grad for p in params])
        torch.nn.utils.clip_grad_norm_(params, big_batch.CLIP_NORM)
        optimizer.step()
        flat = parameters_to_vector(params).detach()
        check_in_sync(group, flat, step)
    return flat, float(buffer[-1])


def check_backend(backend: str) -> None:
    import torch

    from hpcrl.learning.data_parallel import make_data_parallel
    from tests.oracles import big_batch

    hosts = ["one-host"] * group.size
    parallel = make_data_parallel(backend, group, torch.device("cpu"), hosts)
    assert (parallel.rank, parallel.size) == (group.rank, group.size)
    flat, count = train(parallel, seed=10 + group.rank)
    assert count == big_batch.batches()[-1][2].sum()
    torch.testing.assert_close(flat, big_batch.big_batch_parameters(10), rtol=1e-4, atol=1e-5)
    root = group.size - 1
    told = torch.full((5,), float(group.rank))
    parallel.broadcast_(told, root)
    assert told.tolist() == [root] * 5
    parallel.close()
    if group.rank == 0:
        print(json.dumps({"name": parallel.name, "parameters": flat.tolist()}), flush=True)


for backend in sys.argv[1:]:
    if group is not None:
        check_backend(backend)
    everyone.barrier()
if group is None:
    assert "torch" not in sys.modules
    assert "horovod" not in sys.modules
    assert "GLOO_SOCKET_IFNAME" not in os.environ
