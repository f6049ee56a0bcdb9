"""Two learners of an MPI without thread level MULTIPLE: what auto takes and horovod says."""

import torch

from hpcrl.comm.transport import MpiLink, library_facts
from hpcrl.learning.data_parallel import DataParallelError, make_data_parallel

link = MpiLink(deadline_s=100.0, max_message_bytes=1 << 30)
group = link.group([0, 1])
assert library_facts()["thread_level"] == "serialized"
parallel = make_data_parallel("auto", group, torch.device("cpu"), ["a", "b"])
flat = torch.ones(3)
parallel.sum_(flat)
assert flat.tolist() == [2.0] * 3
try:
    make_data_parallel("horovod", group, torch.device("cpu"), ["a", "b"])
except DataParallelError as error:
    if link.rank == 0:
        print(parallel.name, "|", error)
