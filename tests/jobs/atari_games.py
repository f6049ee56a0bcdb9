"""Every Atari game through the whole pipeline: env, actor, wire, inference, unroll, learner."""

from hpcrl.evaluation.atari_scores import reference_scores
from hpcrl.exit_codes import DONE
from hpcrl.run.metrics import read_metrics
from tests.loopback_job import JobRun
from tests.small import config_of

STEPS = 1000
GAMES = sorted(reference_scores())


def play_game(game, tmp_path, monkeypatch, steps=STEPS):
    """Train for `steps` agent steps of four environments; every learner's row is a frame."""
    config = config_of(
        run={"dir": str(tmp_path / "run")},
        env={"name": f"atari:{game}", "envs_per_actor": 4, "groups": 2},
        network={"torso": "mlp", "hidden_sizes": [16]},
        learner={"batch_unrolls": 4, "unroll_steps": 20, "backend": "mpi"},
        stop={"agent_steps": steps},
    )
    run = JobRun(monkeypatch).start(config, 3)
    assert run.codes == [DONE] * 3
    last = read_metrics(tmp_path / "run")[-1]
    assert last["agent_steps"] >= steps
    assert last["frames"] == 4 * last["agent_steps"]
    for unroll in run.all_unrolls[:: len(run.all_unrolls) // 10]:
        assert unroll["obs:obs"].shape == (21, 84, 84)
        assert unroll["obs:obs"].max() > 0
    acted = {int(action) for unroll in run.all_unrolls for action in unroll["action"].ravel()}
    assert len(acted) > 2
