"""Four ranks step rods that are shared by 1, 2 and 4 of them; every rod must go the same way."""

import numpy as np
from mpi4py import MPI

from env_wrappers.heat_rod import HEATERS, HeatRod

world = MPI.COMM_WORLD
rank = world.Get_rank()

ways = []
for size in (1, 2, 4):
    team = world.Split(rank // size, rank)
    rod = HeatRod(team)
    way: list[tuple] = [(rod.reset(seed=3)[0], 0.0, False)]
    rng = np.random.default_rng(0)
    for _step in range(40):
        observation, reward, terminated, truncated, _ = rod.step(rng.uniform(-1, 1, HEATERS))
        assert not terminated
        way.append((observation, reward, truncated))
    ways.append(way)

for way in ways[1:]:
    for (observation, reward, truncated), expected in zip(way, ways[0], strict=True):
        np.testing.assert_array_equal(observation, expected[0])
        np.testing.assert_allclose(reward, expected[1], rtol=1e-12)
        assert truncated == expected[2]
assert [truncated for _, _, truncated in ways[0]] == [False] * 40 + [True]
if rank == 0:
    print("the same way")
