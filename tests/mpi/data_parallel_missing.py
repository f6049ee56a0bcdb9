"""A learner that comes too late, with every backend named on the command line in turn.

Learner 0 prints a JSON list per backend: the backend and what its wait ended with.
"""

import json
import sys

import torch

from hpcrl.comm.transport import MpiLink
from hpcrl.learning.data_parallel import make_data_parallel
from hpcrl.timing import DeadlineError
from tests.link_bodies import await_go, say_go

link = MpiLink(deadline_s=100.0, max_message_bytes=1 << 30)
group = link.group([0, 1])
for backend in sys.argv[1:]:
    parallel = make_data_parallel(backend, group, torch.device("cpu"), ["one-host"] * 2)
    flat = torch.ones(1000)
    if link.rank == 0:
        link.deadline_s = 0.3
        try:
            parallel.sum_(flat)
        except DeadlineError as error:
            print(json.dumps([backend, str(error)]), flush=True)
        link.deadline_s = 100.0
        say_go(link, 1)
    else:
        await_go(link, 0)
        parallel.sum_(flat)
        assert flat.tolist() == [2.0] * 1000
    group.barrier()
    parallel.close()
