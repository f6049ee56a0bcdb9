"""Ranks that step the same environments together follow their leader, and nothing else."""

import numpy as np
import pytest

from env_wrappers import EnvError, make
from hpcrl.acting.env_batches import make_batch
from hpcrl.comm.team import LedBatch, Team
from hpcrl.config.load import parse_config
from hpcrl.roles import follower
from hpcrl.specs import EnvSpec
from tests.job_runner import TrainingJob, run_to_end, status_of
from tests.jobs.test_end_to_end import write_config
from tests.loopback_runner import run_loopback
from tests.mpi_runner import run_mpi

ROWS = 3


class Rod:
    """What a test needs of a job."""

    rows_per_slot = ROWS

    def __init__(self, link, action):
        self.link = link
        self.env = self
        self.action = action


class Noting:
    """Environments that note what is done to them."""

    def __init__(self, envs, log, name, change=lambda batch: batch):
        self._envs, self._log, self._name, self._change = envs, log, name, change
        self.spec, self.num_envs = envs.spec, envs.num_envs

    def reset(self):
        self._log.append((self._name, "reset"))
        return self._envs.reset()

    def step(self, actions):
        self._log.append((self._name, actions.tolist()))
        return self._change(self._envs.step(actions))

    def close(self):
        self._log.append((self._name, "close"))


def envs_of(seed):
    return make("synthetic:counting", ROWS, [seed + i for i in range(ROWS)], {"episode_length": 4})


def run_team(lead, change=lambda batch: batch):
    """A team of a leader and two followers, each with two groups; what was done on each rank."""
    logs: dict[int, list] = {0: [], 1: [], 2: []}

    def body(link):
        team = Team(link.team([[0, 1, 2]]))
        spec_of = change if link.rank == 2 else lambda batch: batch
        parts = [Noting(envs_of(10 * g), logs[link.rank], g, spec_of) for g in range(2)]
        if not team.leads:
            follower.run(Rod(link, EnvSpec.from_json(parts[0].spec).action), parts, team)
            return None
        return lead([LedBatch(envs, team, g) for g, envs in enumerate(parts)])

    run_loopback(body, 3)
    return logs


def test_followers_take_the_same_resets_steps_and_actions_in_the_same_order():
    rng = np.random.default_rng(1)

    def lead(groups):
        for envs in groups:
            envs.reset()
        for turn in rng.integers(2, size=20):
            groups[turn].step(rng.integers(2, size=(ROWS, 1)).astype(np.int32))
        groups[1].close()
        groups[0].step(np.ones((ROWS, 1), np.int32))
        groups[0].close()
        groups[0].close()  # a second time does nothing

    logs = run_team(lead)
    assert len(logs[0]) == 2 + 20 + 3
    assert logs[0][-3:] == [(1, "close"), (0, [[1]] * ROWS), (0, "close")]
    assert logs[1] == logs[0]
    assert logs[2] == logs[0]


@pytest.mark.parametrize("decision", ["terminated", "truncated", "ended", "valid"])
def test_ranks_that_disagree_about_an_episode_are_named(decision):
    def flip(batch):
        changed = getattr(batch, decision).copy()
        changed[1] = not changed[1]
        return batch._replace(**{decision: changed})

    def lead(groups):
        groups[0].reset()
        groups[0].step(np.zeros((ROWS, 1), np.int32))

    with pytest.raises(EnvError, match=f"ranks of one environment disagree: {decision} is .* 2;"):
        run_team(lead, flip)


def test_a_rod_goes_the_same_way_on_one_two_and_four_ranks():
    assert "the same way" in run_mpi("rods_of_several_ranks.py", 4).stdout


def test_a_rod_in_a_process_by_itself_needs_no_other_rank():
    config = parse_config({"env": {"name": "env_wrappers.heat_rod:make", "ranks_per_env": 4}})
    envs = make_batch(config.env, 2, [0, 1])
    batch = envs.reset()
    assert batch.observation["obs"].shape == (2, 32)
    assert (batch.observation["obs"][:, :16] == 0).all()
    envs.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gym:CartPole-v1", "runs in one process, and env.ranks_per_env asks for several"),
        ("tests.train_envs:make", "takes no `communicator`"),
    ],
)
def test_an_environment_that_is_no_program_of_several_ranks_is_refused(name, message):
    with pytest.raises(EnvError, match=message):
        make(name, 1, [0], {}, communicator=object())


def test_a_function_that_needs_a_communicator_says_so_where_there_is_none():
    with pytest.raises(EnvError, match="needs a communicator"):
        make("env_wrappers.heat_rod:make", 1, [0])
    with pytest.raises(EnvError, match="communicator is not an option"):
        make("env_wrappers.heat_rod:make", 1, [0], {"communicator": 1}, communicator=object())


SHARED = {"name": "tests.shared_env:make", "ranks_per_env": 3, "envs_per_actor": 4}


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("layout", ["seed", "impala"])
def test_a_job_of_teams_trains_stops_and_leaves_nothing_behind(tmp_path, layout):
    # A second follower's index isn't its leader's, which its seeds must come from.
    topology = {"learners": 1, "actors": 1, "inference": 1 if layout == "seed" else 0}
    path, run_dir = write_config(
        tmp_path, env=SHARED, layout=layout, topology=topology, stop={"agent_steps": 160}
    )
    code, output = run_to_end(path, timeout_s=150)
    assert code == 0, output
    assert "2 followers" in output
    assert status_of(run_dir)["counters"]["agent_steps"] == 160


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"env": {**SHARED, "isolation": "process"}, "transport": {"deadline_s": 600.0}},
            "a child process is no rank",
        ),
        ({"env": {**SHARED, "name": "gym:CartPole-v1"}}, "env.ranks_per_env asks for several"),
        ({"env": SHARED, "topology": {"evaluators": 1}}, "set topology.evaluators to 0"),
        ({"env": SHARED, "topology": {"ranks": 6, "actors": "auto"}}, "ranks without a role"),
    ],
)
def test_what_teams_can_not_do_is_said_before_training(tmp_path, change, message):
    path, _ = write_config(tmp_path, **change)
    code, output = run_to_end(path, timeout_s=150)
    assert code == 2, output
    assert message in output
    assert "Traceback" not in output


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_user_stops_a_job_of_teams_and_it_goes_on(tmp_path):
    path, run_dir = write_config(tmp_path, env=SHARED, stop={"agent_steps": 2000})
    with TrainingJob(path) as job:
        job.wait_until(lambda: status_of(run_dir).get("state") == "running", "training")
        job.signal(15)
        assert job.finish() == 75
    code, output = run_to_end(path, timeout_s=150)
    assert code == 0, output
