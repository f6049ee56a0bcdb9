"""Ranks of `hpcrl bench wire`: hpcrl's step messages and raw mpi4py, in turn.

Rank 0 serves, the others are clients. Both ways send the same bytes and get the same reply.
hpcrl's way is the code of the actor and of the inference rank: `GroupChannel` and `StepSlots`.
The raw way is a blocking Send and Recv at the client, persistent receives and Waitsome at the
server (Recv and Send for one client).
"""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from env_wrappers.batch import StepBatch
from hpcrl.bench.ranks import read_arguments, write_result
from hpcrl.comm.slots import Client, StepSlots
from hpcrl.comm.transport import MpiLink
from hpcrl.comm.wire import reply_layout, step_layout, step_short_nbytes
from hpcrl.job import ACTOR_STAGES
from hpcrl.roles.actor import GroupChannel
from hpcrl.specs import ENV_FAILURES, ActionPart, ActionSpec, ArraySpec, EnvSpec, ObservationLeaf
from hpcrl.timing import choose_wait_policy

TAG_STEP, TAG_REPLY = 1, 2
QUANTITIES = ("steps_per_s", "p10_us", "p50_us", "p99_us")
FAILURES = dict.fromkeys(ENV_FAILURES, 0)
TIMERS = dict.fromkeys(ACTOR_STAGES, 0.0)


def env_of(row_bytes: int) -> EnvSpec:
    """An environment whose observation has so many bytes."""
    leaf = ObservationLeaf(ArraySpec((row_bytes,), "uint8"))
    return EnvSpec("bench:wire", {"obs": leaf}, ActionSpec((ActionPart("discrete", (4,)),)))


def constant_batch(row_bytes: int, rows: int) -> StepBatch:
    """What the environments would give."""
    no = np.zeros(rows, bool)
    return StepBatch(
        observation={"obs": np.ones((rows, row_bytes), np.uint8)},
        reward=np.zeros(rows, np.float32),
        terminated=no,
        truncated=no,
        valid=~no,
        restarted=no,
        final_observation=None,
        ended=no,
        episode_return=np.zeros(rows, np.float32),
        episode_steps=np.zeros(rows, np.int32),
    )


def hpcrl_client(link, env, rows, with_copies):
    """Seconds of every round trip."""
    channel = GroupChannel(link, env, 0, 0, rows, 0)
    batch = constant_batch(env.observation["obs"].array.nbytes, rows)
    channel.pack(batch, TIMERS, FAILURES)
    seconds = []
    while True:
        start_s = time.perf_counter()
        if with_copies:
            channel.pack(batch, TIMERS, FAILURES)
        channel.send(batch)
        if channel.receive() is None:
            break
        seconds.append(time.perf_counter() - start_s)
    channel.close()
    return seconds


def hpcrl_server(link, env, rows, with_copies, seconds):
    """Steps answered in `seconds`, per second."""
    clients = [Client(rank, 0) for rank in range(1, link.size)]
    slots = StepSlots(link, env, clients, rows, len(ACTOR_STAGES), 1, 0.0)
    waiter = link.waiter(lambda: "the server waited for steps")
    actions = np.zeros((rows * len(clients), 1), np.int32)
    everywhere = np.arange(rows * len(clients))
    answered, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        slots.poll()
        if not slots.due():
            waiter.idle()
            continue
        waiter.progress()
        taken = slots.take()
        places = slots.rows(taken)[1] if with_copies else everywhere[: rows * len(taken)]
        slots.reply(taken, places, actions[: len(places)])
        answered += len(taken)
    rate = answered / (time.perf_counter() - start_s)
    slots.stop(link)
    slots.close()
    return rate


def raw_client(comm, step, reply):
    """Seconds of every round trip; the reply's first byte says stop."""
    seconds: list[float] = []
    while True:
        start_s = time.perf_counter()
        comm.Send([step, MPI.BYTE], 0, TAG_STEP)
        comm.Recv([reply, MPI.BYTE], 0, TAG_REPLY)
        if reply[0]:
            return seconds
        seconds.append(time.perf_counter() - start_s)


def raw_server_of_one(comm, step, reply, seconds):
    """The plainest ping-pong there is."""
    answered, start_s = 0, time.perf_counter()
    reply[0] = 0
    while time.perf_counter() - start_s < seconds:
        comm.Recv([step, MPI.BYTE], 1, TAG_STEP)
        comm.Send([reply, MPI.BYTE], 1, TAG_REPLY)
        answered += 1
    rate = answered / (time.perf_counter() - start_s)
    comm.Recv([step, MPI.BYTE], 1, TAG_STEP)
    reply[0] = 1
    comm.Send([reply, MPI.BYTE], 1, TAG_REPLY)
    return rate


def raw_server(comm, num_bytes, reply, seconds):
    """Answers whoever has sent."""
    clients = comm.Get_size() - 1
    steps = np.zeros((clients, num_bytes), np.uint8)
    requests = [comm.Recv_init([steps[i], MPI.BYTE], i + 1, TAG_STEP) for i in range(clients)]
    MPI.Prequest.Startall(requests)
    answered, stopped, rate, reply[0] = 0, 0, 0.0, 0
    start_s = time.perf_counter()
    while stopped < clients:
        arrived = MPI.Request.Waitsome(requests)
        elapsed_s = time.perf_counter() - start_s
        if not reply[0] and elapsed_s >= seconds:
            rate, reply[0] = answered / elapsed_s, 1
        for index in arrived:
            if reply[0]:
                stopped += 1
            else:
                requests[index].Start()
                answered += 1
            comm.Send([reply, MPI.BYTE], index + 1, TAG_REPLY)
    for request in requests:
        request.Free()
    return rate


def quantiles(comm, seconds):
    """10th, 50th and 99th percentile of all clients' round trips in microseconds.

    Clients are few enough or alike enough that the mean of their quantiles will do.
    """
    own = np.zeros(4)
    if len(seconds):
        own = np.array([*np.percentile(seconds, [10, 50, 99]), 1.0])
    total = np.empty_like(own)
    comm.Allreduce(own, total)
    return (1e6 * total[:3] / max(total[3], 1.0)).tolist()


def one_size(link, comm, case, arguments):
    """Medians over the rounds for one message size."""
    row_bytes, rows = case
    env = env_of(row_bytes)
    num_bytes = step_short_nbytes(env, step_layout(env, rows, len(ACTOR_STAGES)))
    step = np.ones(num_bytes, np.uint8)
    reply = np.zeros(reply_layout(env, rows).nbytes, np.uint8)
    found: dict[str, list] = {"hpcrl": [], "hpcrl_with_copies": [], "raw": []}
    for _ in range(arguments["rounds"]):
        for way, rounds in found.items():
            comm.Barrier()
            rate, seconds = 0.0, []
            if way == "raw":
                if link.rank:
                    seconds = raw_client(comm, step, reply)
                elif link.size == 2:
                    rate = raw_server_of_one(comm, step, reply, arguments["seconds"])
                else:
                    rate = raw_server(comm, num_bytes, reply, arguments["seconds"])
            else:
                copies = way == "hpcrl_with_copies"
                if link.rank:
                    seconds = hpcrl_client(link, env, rows, copies)
                else:
                    rate = hpcrl_server(link, env, rows, copies, arguments["seconds"])
            rounds.append([rate, *quantiles(comm, seconds)])
    fastest = {way: np.array(rounds)[:, 1] for way, rounds in found.items()}
    return {
        "row_bytes": row_bytes,
        "rows": rows,
        "message_bytes": num_bytes,
        "clients": link.size - 1,
        "wait": link.wait_policy,
        **{
            way: dict(zip(QUANTITIES, np.median(r, 0).tolist(), strict=True))
            for way, r in found.items()
        },
        # Of each round, as the machine's speed drifts from one to the next, and of the fastest
        # tenth: when others want the cores, the rest shows the system's time slices.
        "ratio": float(np.median(fastest["hpcrl"] / fastest["raw"])),
        "ratio_with_copies": float(np.median(fastest["hpcrl_with_copies"] / fastest["raw"])),
    }


def main() -> None:
    """Measure every size."""
    arguments = read_arguments()
    link = MpiLink(deadline_s=120.0, max_message_bytes=2**30)
    link.wait_policy = choose_wait_policy(arguments["wait"], link.size, arguments["cores"])
    comm = MPI.COMM_WORLD.Dup()
    cases = [one_size(link, comm, case, arguments) for case in arguments["cases"]]
    if link.rank == 0:
        write_result(arguments, {"cases": cases})


if __name__ == "__main__":
    main()
