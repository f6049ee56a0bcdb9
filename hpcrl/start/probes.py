"""What `hpcrl check` looks at on one machine; each probe returns findings and never raises."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hpcrl import exit_codes
from hpcrl.comm.link import Group
from hpcrl.config.root import Config
from hpcrl.durable import atomic_write, reason, write_synced
from hpcrl.human import format_bytes
from hpcrl.node.devices import detect_gpu_count, torch_backend
from hpcrl.specs import ActionPart, EnvSpec

_LARGE_BYTES, _SMALL_FILES = 2**24, 20


class Finding(NamedTuple):
    """One line of the table.

    Attributes:
      subject: what was looked at.
      found: in words.
      code: exit code that it asks for; 0 when it works.
      note: whether the reader should look at it, although nothing needed is broken.
    """

    subject: str
    found: str
    code: int = exit_codes.DONE
    note: bool = False


def probe_torch() -> Finding:
    """Version, devices and threads of torch."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", f"can't be imported: {error}", exit_codes.INTERNAL)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices = ", ".join(gpus) or "CPU only"
    files = detect_gpu_count(torch_backend())
    text = f"{torch.__version__}; {devices}; {torch.get_num_threads()} threads by default"
    if files and not gpus:
        return Finding("torch", f"{text}; {files} GPU device files, but no working GPU", note=True)
    return Finding("torch", text)


def probe_horovod(group: Group | None) -> Finding:
    """Whether Horovod can reduce gradients here; `group` None: MPI doesn't work."""
    try:
        version = metadata.version("horovod")
    except metadata.PackageNotFoundError:
        text = "not installed; gradients go over MPI or torch; `make horovod` builds it"
        return Finding("Horovod", text, note=True)
    if group is None:
        return Finding("Horovod", f"{version}, which needs a working MPI", note=True)
    from hpcrl.learning.data_parallel import horovod_obstacle

    obstacle = horovod_obstacle(group)
    if obstacle:
        return Finding("Horovod", f"{version}: {obstacle}", note=True)
    return Finding("Horovod", f"{version}, built with MPI")


def probe_environments() -> Finding:
    """Which environment families are installed."""
    from env_wrappers.families import FAMILIES

    found = []
    for family in FAMILIES:
        versions = family.versions()
        if versions is None:
            what = f"not installed: {family.install_command}"
        else:
            what = ", ".join(f"{k} {v}" for k, v in versions.items()) or "built in"
        found.append(f"{family.key} ({what})")
    return Finding("environments", ", ".join(found))


def probe_configured_environment(config: Config) -> Finding:
    """Make one of the configured environments and step it."""
    from hpcrl.acting.env_batches import make_one

    name = config.env.name
    try:
        start_s = time.perf_counter()
        batch = make_one(config.env)
        spec = EnvSpec.from_json(batch.spec)
        batch.reset()
        batch.step(np.repeat(_some_action(spec), batch.num_envs, 0))
        batch.close()
    except Exception as error:
        return Finding(name, f"{type(error).__name__}: {error}", exit_codes.USAGE)
    leaves = [
        f"{p} {leaf.array.dtype}{list(leaf.array.shape)}" for p, leaf in spec.observation.items()
    ]
    took_s = time.perf_counter() - start_s
    return Finding(name, f"made and stepped in {took_s:.2f} s; observes {', '.join(leaves)}")


def _some_action(spec: EnvSpec) -> np.ndarray[Any, Any]:
    def values(part: ActionPart) -> list[float]:
        if part.kind == "discrete":
            return [0.0] * part.size
        return np.clip(np.zeros(part.size), part.low, part.high).tolist()

    flat = [value for part in spec.action.parts for value in values(part)]
    return np.array([flat], spec.action.dtype)


def probe_file_system(run_dir: Path) -> Finding:
    """Write, sync and rename where a run directory would be."""
    where = next(path for path in (run_dir, *run_dir.absolute().parents) if path.is_dir())
    subject = f"files in {where.absolute()}"
    try:
        folder = Path(tempfile.mkdtemp(prefix=".hpcrl-check-", dir=where))
        try:
            large_s, small_s = _time_writes(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        return Finding(subject, f"can't be written: {reason(error)}", exit_codes.USAGE)
    free = shutil.disk_usage(where).free
    return Finding(
        subject,
        f"{format_bytes(_LARGE_BYTES / large_s)}/s written and synced, {1e3 * small_s:.1f} ms to "
        f"replace a small file; {format_bytes(free)} free",
    )


def _time_writes(folder: Path) -> tuple[float, float]:
    """Seconds of one large synced write, and of replacing a small file.

    Raises:
      OSError: it doesn't work, or a rename did not replace what was there.
    """
    start_s = time.perf_counter()
    write_synced(folder / "large", bytes(_LARGE_BYTES))
    large_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    for number in range(_SMALL_FILES):
        atomic_write(folder / "small", str(number))
    small_s = (time.perf_counter() - start_s) / _SMALL_FILES
    # A checkpoint becomes visible by the rename of its directory.
    (folder / "partial").mkdir()
    os.rename(folder / "partial", folder / "final")
    if (folder / "small").read_text() != str(_SMALL_FILES - 1) or not (folder / "final").is_dir():
        raise OSError("a renamed file does not have its new contents")
    return large_s, small_s


def probe_memory() -> Finding:
    """Memory of this node, and the limit of the job's control group where there is one."""
    import psutil

    memory = psutil.virtual_memory()
    limit = min(_group_limits_bytes(Path("/proc/self/cgroup")), default=None)
    text = f"{format_bytes(memory.available)} of {format_bytes(memory.total)} available"
    if limit is not None and limit < memory.total:
        text += f"; this job may use {format_bytes(limit)}"
    return Finding("memory", text)


def _group_limits_bytes(membership: Path, root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yield the memory limits (cgroup v2) of the process's group and of those that hold it."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        hierarchy, _, name = line.split(":", 2)
        if hierarchy != "0":
            continue
        group = root / name.lstrip("/")
        for folder in (group, *group.parents):
            try:
                limit = (folder / "memory.max").read_text(encoding="utf-8").strip()
            except OSError:
                continue
            if limit.isdecimal():
                yield int(limit)
