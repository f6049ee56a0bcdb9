"""Runs every body of tests/link_bodies.py over MPI; rank 0 prints the names of those that held."""

from hpcrl.comm.transport import MpiLink
from tests.link_bodies import BODIES, PART_BYTES, a_collective_deadline_names_the_collective

link = MpiLink(deadline_s=100.0, max_message_bytes=PART_BYTES)
everyone = link.group(range(link.size))
for body in BODIES:
    body(link)
    everyone.barrier()
    if link.rank == 0:
        print("held:", body.__name__, flush=True)
hasty = MpiLink(deadline_s=0.1, max_message_bytes=PART_BYTES)
a_collective_deadline_names_the_collective(hasty)
everyone.barrier()
if link.rank == 0:
    print("held:", a_collective_deadline_names_the_collective.__name__, flush=True)
