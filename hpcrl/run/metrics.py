"""metrics.jsonl and TensorBoard from one writer: append-only, continuous over restarts."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

from hpcrl.durable import atomic_write, json_text, reason
from hpcrl.run.counters import Counters
from hpcrl.run.run_dir import METRICS, TENSORBOARD, RunDirError

_TAIL_BYTES = 2**17


class MetricsWriter:
    """Appends one JSON object per line to metrics.jsonl, and scalars to TensorBoard.

    Args:
      run_dir: the run directory.
      restart: restart index of this process, noted in every record.
      tensorboard: also write an event file; its x axis is emulator frames: of `eval/...` those
        of the weights that were evaluated.
      start: counters at the start; what TensorBoard already shows beyond them is withdrawn.
      clock: Unix seconds.

    Raises:
      RunDirError: metrics.jsonl can't be opened.
    """

    def __init__(
        self,
        run_dir: Path,
        restart: int,
        tensorboard: bool,
        start: Counters | None = None,
        clock: Callable[[], float] = time.time,
    ):
        self._path = run_dir / METRICS
        self._restart = restart
        self._clock = clock
        try:
            self._file = self._path.open("ab+", buffering=0)
            end = self._file.seek(0, os.SEEK_END)
            if end and os.pread(self._file.fileno(), 1, end - 1) != b"\n":
                self._append(b"\n")  # after a line that a kill cut short
        except OSError as error:
            raise _not_written(self._path, error) from None
        self._event_folder = run_dir / TENSORBOARD
        self._events: _EventFile | None = None
        if tensorboard:
            first_frame = start.frames if start else 0
            try:
                self._events = _EventFile(self._event_folder, restart, first_frame, clock)
            except OSError as error:
                raise self._no_events(error) from None

    def write(
        self,
        counters: Counters,
        values: Mapping[str, float | None],
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Append one record and hand it to the operating system.

        Args:
          counters: totals so far.
          values: metrics by name; NaN, infinities and None become null.
          notes: words by name, for metrics.jsonl alone.

        Returns:
          The record: time_unix_s, restart, the counters, the values.

        Raises:
          RunDirError: it can't be written; no part of it is left in the file.
          ValueError: a value has the name of a counter.
        """
        now_s = self._clock()
        head = {"time_unix_s": now_s, "restart": self._restart, **counters.to_dict()}
        if clash := head.keys() & values.keys():
            raise ValueError(f"metrics {sorted(clash)} have names of counters")
        record: dict[str, Any] = json.loads(json_text({**head, **values, **notes}))
        self._append(json.dumps(record).encode() + b"\n")
        if self._events is not None:
            scalars = {name: record[name] for name in values if record[name] is not None}
            played = {name: scalars.pop(name) for name in list(scalars) if name.startswith("eval/")}
            try:
                self._events.write(now_s, counters.frames, scalars)
                if played:
                    self._events.write(now_s, int(played["eval/frames"]), played)
            except OSError as error:
                self._events.abandon()
                self._events = None
                raise self._no_events(error) from None
        return record

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._events is not None:
            self._events.close()

    def _no_events(self, error: OSError) -> RunDirError:
        return RunDirError(
            f"can't write TensorBoard's event file in {self._event_folder} ({reason(error)}): "
            f"none is written until the next restart, {METRICS} goes on"
        )

    def _append(self, line: bytes) -> None:
        end = os.fstat(self._file.fileno()).st_size
        try:
            # A disk that fills up takes a part first and says so at the next write only.
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)
            raise _not_written(self._path, error) from None


class _EventFile:
    """A TensorBoard event file, written in this thread and flushed at each write."""

    def __init__(
        self, folder: Path, restart: int, first_frame: int, clock: Callable[[], float]
    ) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        now_s, host = clock(), os.uname().nodename
        name = f"events.out.tfevents.{int(now_s):010d}.{host}.{os.getpid()}.restart-{restart}"
        self._file: BinaryIO = (folder / name).open("wb")
        self._records = RecordWriter(self._file)
        self._emit(Event(wall_time=now_s, file_version="brain.Event:2"))
        # The reader withdraws all points from this step on that earlier files hold.
        start = SessionLog(status=SessionLog.START)
        self._emit(Event(wall_time=now_s, step=first_frame + 1, session_log=start))

    def write(self, now_s: float, frames: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._emit(Event(wall_time=now_s, step=frames, summary=Summary(value=values)))

    def close(self) -> None:
        self._records.close()

    def abandon(self) -> None:
        """Close after an error, which closing would raise again."""
        with contextlib.suppress(OSError):
            self._records.close()

    def _emit(self, event: Any) -> None:
        self._records.write(event.SerializeToString())
        self._records.flush()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of metrics.jsonl, oldest first; none where there is no such file.

    A last line that a kill cut short is passed over.

    Raises:
      RunDirError: the file can't be read, or another line is no record.
    """
    lines = _read_lines(run_dir / METRICS)
    records = [_parse(line) for line in lines]
    if records and records[-1] is None:
        records.pop()
    if None in records:
        number = records.index(None) + 1
        raise RunDirError(f"{run_dir / METRICS}: line {number} is no record of metrics")
    return [record for record in records if record is not None]


def read_last_metrics(run_dir: Path) -> dict[str, Any] | None:
    """Return the newest whole record from the end of metrics.jsonl, None if there is none."""
    try:
        with (run_dir / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read().splitlines()
    except OSError:
        return None
    return next((record for line in reversed(tail) if (record := _parse(line))), None)


def discard_metrics_after(run_dir: Path, learner_steps: int) -> int:
    """Move records beyond a learner step, and cut lines, to metrics.discarded.jsonl.

    Call it before a resumed run appends, so that the curve is continuous. -1 moves all.

    Returns:
      How many lines were moved.

    Raises:
      RunDirError: the files can't be read or written.
    """
    path = run_dir / METRICS
    kept: list[bytes] = []
    dropped: list[bytes] = []
    for line in _read_lines(path):
        record = _parse(line)
        good = record is not None and record.get("learner_steps", math.inf) <= learner_steps
        (kept if good else dropped).append(line + b"\n")
    if not dropped:
        return 0
    try:
        # A kill between the two leaves lines in both files, but none in neither.
        with (run_dir / "metrics.discarded.jsonl").open("ab") as file:
            file.writelines(dropped)
            file.flush()
            os.fsync(file.fileno())
        atomic_write(path, b"".join(kept))
    except OSError as error:
        raise _not_written(path, error) from None
    return len(dropped)


def _read_lines(path: Path) -> list[bytes]:
    try:
        # Not splitlines: a cut line may hold any byte, and JSON escapes newlines.
        return [line for line in path.read_bytes().split(b"\n") if line]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirError(f"can't read {path}: {reason(error)}") from None


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _not_written(path: Path, error: OSError) -> RunDirError:
    return RunDirError(
        f"can't write {path} ({reason(error)}): the metrics since its last record are lost"
    )
