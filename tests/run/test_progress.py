import io
import re
import sys

import pytest

from hpcrl.config.sections import StopConfig
from hpcrl.run.progress import Progress, TimeLeft, choose_mode

RECORD = {
    "frames": 4_920_000,
    "agent_steps": 1_230_000,
    "wall_time_s": 100.0,
    "frames_per_s": 4800.0,
    "learner_steps_per_s": 9.8,
    "policy_lag": 1.25,
    "batch_fill": 0.87,
    "queue_fill": 0.4,
    "mean_return_100": 12.3,
    "episodes_100": 57,
}
SHOWN = {
    "frames": "4.92 M",
    "agent steps": "1.23 M",
    "frames/s": "4.8 k",
    "return": "12.3 (57 episodes)",
    "learner steps/s": "9.8",
    "policy lag": "1.25",
    "batch fill": "87 %",
    "queue fill": "40 %",
    "time left": "-",
}


def record(frames, wall_time_s):
    return {"frames": frames, "agent_steps": frames // 4, "wall_time_s": wall_time_s}


@pytest.mark.parametrize(
    ("mode", "is_terminal", "environ", "expected"),
    [
        ("auto", True, {"TERM": "xterm"}, "live"),
        ("auto", False, {"TERM": "xterm"}, "plain"),
        ("auto", False, {"TERM": "xterm", "HPCRL_TTY": "1"}, "live"),
        ("auto", True, {"TERM": "xterm", "HPCRL_TTY": "0"}, "plain"),
        ("auto", True, {"TERM": "dumb"}, "plain"),
        ("auto", True, {}, "plain"),
        ("live", False, {}, "live"),
        ("plain", True, {"TERM": "xterm", "HPCRL_TTY": "1"}, "plain"),
    ],
)
def test_the_launcher_knows_the_terminal_better_than_the_rank(mode, is_terminal, environ, expected):
    assert choose_mode(mode, is_terminal, environ) == expected


def test_time_left_is_that_of_the_first_condition_to_hold():
    left = TimeLeft(StopConfig(frames=10_000, agent_steps=2000, wall_time_s=500.0))
    # Only the clock's pace is known beforehand: 500 s - 100 s.
    assert left.seconds(record(1000, 100.0)) == 400.0
    # 100 frames/s or 25 agent steps/s: 8000 / 100 = 80 s, (2000 - 500) / 25 = 60 s.
    assert left.seconds(record(2000, 110.0)) == pytest.approx(60.0)
    assert left.seconds(record(8000, 170.0)) == 0.0


def test_time_left_is_unknown_without_a_condition_or_a_rate():
    assert TimeLeft(StopConfig(mean_return=3.0)).seconds(record(1, 1.0)) is None
    assert TimeLeft(StopConfig(frames=100)).seconds(record(1, 1.0)) is None


def test_plain_lines_hold_every_field_and_come_at_the_interval(capsys):
    now = [0.0]
    progress = Progress("run", StopConfig(), "plain", plain_every_s=10.0, clock=lambda: now[0])
    progress.update(RECORD)
    now[0] = 9.0
    progress.update(record(2, 2.0))
    now[0] = 10.0
    progress.update(record(3, 3.0))
    progress.say("checkpoint of learner step 3")
    now[0] = 11.0
    progress.update(record(4, 4.0))
    progress.close()
    progress.close()
    out = capsys.readouterr().out.splitlines()
    cells = dict(re.match(r"(.*?) ([-\d].*)", cell).groups() for cell in out[0].split(" | "))
    assert cells == SHOWN
    assert [line.split(" | ")[0] for line in out] == [
        "frames 4.92 M",
        "frames 3",
        "checkpoint of learner step 3",
        "frames 4",
    ]


@pytest.mark.parametrize("columns", [100, 60, 20])
def test_the_live_panel_fits_the_terminals_width(monkeypatch, columns):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("HPCRL_TTY", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    progress = Progress("runs/[bold]odd name[/x]", StopConfig())
    assert progress.mode == "live"
    progress.update(RECORD)
    progress.say("a [line] above")
    progress.close()
    assert sys.stdout is screen
    text = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", screen.getvalue())
    assert max(len(line) for line in re.split(r"[\r\n]", text)) <= columns
    if columns == 100:
        assert "runs/[bold]odd name[/x]" in text
        assert "a [line] above" in text
        assert "[dim]" not in text
        for label, value in SHOWN.items():
            assert re.search(rf"{re.escape(label)}\s+{re.escape(value)}", text), label


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_a_reader_that_went_away_does_not_end_the_run(monkeypatch, mode):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Gone())
    progress = Progress("run", StopConfig(), mode)
    for seconds in range(3):
        progress.update(record(seconds, float(seconds)))
    progress.say("text")
    progress.close()


def test_the_return_of_evaluators_is_shown_where_there_are_any(capsys):
    progress = Progress("run", StopConfig(), mode="plain", clock=lambda: 0.0)
    progress.update({**RECORD, "eval/return": 21.5})
    progress.close()
    assert "| eval return 21.5 |" in capsys.readouterr().out


def test_a_terminal_that_a_launcher_made_is_no_sign_of_the_users():
    environ = {"TERM": "xterm", "OMPI_COMM_WORLD_SIZE": "3"}
    assert choose_mode("auto", True, environ) == "plain"
    assert choose_mode("auto", True, {**environ, "HPCRL_TTY": "1"}) == "live"
    assert choose_mode("auto", True, {"TERM": "xterm"}) == "live"
