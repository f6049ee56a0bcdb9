"""What `hpcrl eval` writes is what it played."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

from analysis.reader import Run
from analysis.video import find_ffmpeg
from analysis.video import main as video_main
from hpcrl.cli import main
from hpcrl.evaluation.atari_scores import human_normalised, reference_scores
from hpcrl.evaluation.play import env_seed, evaluate_run
from tests.evaluation.test_evaluation import random_network, save
from tests.small import config_of


@pytest.mark.parametrize("truncate", [False, True])
def test_recorded_episodes_are_those_of_the_table(tmp_path, truncate):
    options = {"episode_length": 4, "length_spread": 5, "truncate": truncate}
    config = config_of(env={"name": "synthetic:counting", "options": options})
    save(tmp_path, config, random_network(config))
    plain = evaluate_run(tmp_path, 7, 3, True, None, seed=2)
    result = evaluate_run(tmp_path, 7, 3, True, None, seed=2, record=True, videos=1)
    assert result.episodes == plain.episodes
    assert plain.folder is None
    table = Run(result.folder).episodes().sort_values(["env_id", "episode"])
    assert table["complete"].all()
    assert (table["truncated"] == truncate).all()
    assert table["return"].tolist() == [e.episode_return for e in result.episodes]
    assert table["length"].tolist() == [e.agent_steps for e in result.episodes]
    assert table["env_seed"].tolist() == [env_seed(2, i) for i in (0, 0, 0, 1, 1, 2, 2)]
    with (result.folder / "episodes.csv").open() as file:
        rows = list(csv.reader(file))[1:]
    assert [(float(r), int(n), c == "True") for r, n, c in rows] == list(result.episodes)
    summary = json.loads((result.folder / "summary.json").read_text())
    returns = [e.episode_return for e in result.episodes]
    assert summary["median_return"] == np.median(returns)
    assert summary["human_normalised"] is None
    again = evaluate_run(tmp_path, 1, 1, True, None, seed=2, record=True)
    assert again.folder != result.folder


IMAGES = {"observation_shape": [20, 24], "episode_length": 4, "length_spread": 5}


def saved_run(path, options, **sections):
    config = config_of(env={"name": "synthetic:counting", "options": options}, **sections)
    save(path, config, random_network(config))


@pytest.mark.parametrize("kind", ["mp4", "gif"])
def test_a_video_of_the_best_episode_is_written(tmp_path, monkeypatch, kind):
    if kind == "gif":
        monkeypatch.setattr("analysis.video.find_ffmpeg", lambda: None)
    elif find_ffmpeg() is None:
        pytest.skip("neither ffmpeg nor imageio-ffmpeg is here: no mp4 can be made")
    saved_run(tmp_path, IMAGES)
    result = evaluate_run(tmp_path, 3, 3, True, None, seed=2, record=True, videos=1)
    table = Run(result.folder).episodes()
    best = int(table["return"].idxmax())
    (video,) = result.folder.glob("episode-*.*")
    assert video.name == f"episode-{best}.{kind}"
    if kind == "mp4":
        assert video.read_bytes()[4:8] == b"ftyp"
        return
    with Image.open(video) as gif:
        assert (gif.format, gif.n_frames) == ("GIF", table["length"][best])


def test_a_long_video_is_cut_and_how_to_see_all_of_it_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("analysis.video.find_ffmpeg", lambda: None)
    monkeypatch.setattr("analysis.video.MOST_FRAMES", 3)
    monkeypatch.chdir(tmp_path)
    saved_run(tmp_path, IMAGES)
    result = evaluate_run(tmp_path, 1, 1, True, None, seed=2, record=True, videos=1)
    with Image.open(result.folder / "episode-0.gif") as gif:
        assert gif.n_frames == 3
    (message,) = result.messages
    (steps,) = [episode.agent_steps for episode in result.episodes]
    assert message.startswith(f"the video of episode 0 shows the first 3 of {steps} frames; all")
    command = message.partition("all of them: python -m analysis.video ")[2].split()
    assert video_main([*command, "-o", "all.gif"]) == 0
    with Image.open("all.gif") as gif:
        assert gif.n_frames == steps


def test_every_episode_is_recorded_however_small_the_buffer_of_training_is(tmp_path):
    saved_run(tmp_path, IMAGES, recording={"buffer_bytes": 1})
    result = evaluate_run(tmp_path, 20, 3, True, None, seed=2, record=True)
    table = Run(result.folder).episodes().sort_values(["env_id", "episode"])
    assert table["return"].tolist() == [e.episode_return for e in result.episodes]
    assert result.losses == ()


def disk_full(*arguments, **options):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("hpcrl.recording.segment._extend", "7 of 7 episodes are not in the recording"),
        ("hpcrl.evaluation.files.atomic_write", "the table can't be written"),
        ("analysis.video.encode", "the videos can't be written"),
    ],
)
def test_a_full_disk_costs_what_it_would_hold_and_never_the_scores(
    tmp_path, monkeypatch, capsys, broken, told
):
    saved_run(tmp_path, IMAGES)
    plain = evaluate_run(tmp_path, 7, 3, True, None, seed=1)
    monkeypatch.setattr(broken, disk_full)
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(tmp_path), "--episodes", "7", "--envs", "3"])
    assert ended.value.code == 74
    printed = " ".join(capsys.readouterr().out.split())
    assert f"{plain.summary()['mean_return']:.4g}" in printed
    assert f"lost: {told}" in printed
    assert "No space left on device" in printed
    (folder,) = (tmp_path / "evaluations").iterdir()
    assert (folder / "episodes.csv").exists() == ("table" not in told)
    assert not list(folder.glob("episode-*.*"))


def test_a_video_that_cannot_be_is_told(tmp_path, capsys):
    saved_run(tmp_path / "vector", {"episode_length": 4})
    result = evaluate_run(tmp_path / "vector", 1, 1, True, None, seed=2, record=True, videos=1)
    (message,) = result.messages
    assert message == "no video of synthetic:counting is made: no observation is an image"
    saved_run(tmp_path / "blind", IMAGES, recording={"fields": ["policy_version"]})
    result = evaluate_run(tmp_path / "blind", 1, 1, True, None, seed=2, record=True, videos=1)
    (message,) = result.messages
    assert message.endswith("is made: recording.fields has no observation")
    with pytest.raises(SystemExit) as ended:
        main(["eval", str(tmp_path / "blind"), "--no-record", "--videos", "1"])
    assert ended.value.code == 2
    assert "1 videos need a recording" in capsys.readouterr().err


def test_random_play_scores_nought_and_human_play_one():
    assert len(reference_scores()) == 57
    assert human_normalised("atari:Breakout", 1.7) == 0.0
    assert human_normalised("atari:Breakout", 30.5) == 1.0
    assert human_normalised("atari:MsPacman", (307.3 + 6951.6) / 2) == pytest.approx(0.5)
    assert human_normalised("atari:Adventure", 1.0) is None
    assert human_normalised("gym:CartPole-v1", 1.0) is None
