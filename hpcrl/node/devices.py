"""Which GPUs this process can use, found without importing torch, and which of them it takes."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Literal, NamedTuple

Backend = Literal["cuda", "hip", "none"]
"""What the installed torch was built for."""


class DeviceError(RuntimeError):
    """A rank cannot have the GPU that it was planned for (exit code 71)."""


class VisibleGpu(NamedTuple):
    """One GPU that this process can use.

    Attributes:
      name: as the mask names it: an index, a UUID or a MIG instance.
      ordinal: its number in torch, as in "cuda:0".
      pin: the value that CUDA_VISIBLE_DEVICES must get before CUDA starts; None to leave it.
    """

    name: str
    ordinal: int
    pin: str | None = None


def visible_gpus(
    environ: Mapping[str, str], detected_count: int, backend: Backend = "cuda"
) -> tuple[VisibleGpu, ...]:
    """Return the GPUs that the environment leaves of the detected ones, in torch's order.

    A mask variable that is unset leaves all; one that is empty, or starts with a negative
    or unknown entry, hides all. As in CUDA, the list ends at the first entry that is not
    valid, and an entry given twice hides all. Without a mask, Slurm's SLURM_STEP_GPUS holds
    where the job does not own the whole node and devices are not confined.

    A process can use one MIG instance only, and only the first one it sees: each MIG
    instance therefore comes with the mask that pins it. Other GPUs are never masked
    further, since NCCL and peer-to-peer copies need to see the neighbours.

    Args:
      environ: the environment, such as `os.environ`.
      detected_count: GPUs whose devices this process can open (`detect_gpu_count`).
      backend: "cuda" reads CUDA_VISIBLE_DEVICES; "hip" reads ROCR_VISIBLE_DEVICES and,
        within what that leaves, HIP_VISIBLE_DEVICES (else CUDA_VISIBLE_DEVICES).
    """
    if detected_count < 1 or backend == "none":
        return ()
    physical = [str(i) for i in range(detected_count)]
    if backend == "cuda":
        masks = [environ.get("CUDA_VISIBLE_DEVICES")]
    else:
        inner = environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES"))
        masks = [environ.get("ROCR_VISIBLE_DEVICES"), inner]
    if all(mask is None for mask in masks):
        owned = _step_gpus(environ, detected_count)
        return tuple(VisibleGpu(str(i), i) for i in owned)
    names = physical
    for mask in masks:
        if mask is not None:
            names = _masked(mask, names)
    return tuple(
        VisibleGpu(name, 0, pin=name) if name.startswith("MIG-") else VisibleGpu(name, ordinal)
        for ordinal, name in enumerate(names)
    )


def choose_device(
    index: int, visible: tuple[VisibleGpu, ...], host: str = "this node"
) -> VisibleGpu:
    """Return the GPU that the topology numbers `index` within the node.

    Raises:
      DeviceError: when this process sees fewer GPUs than the plan counted on the node.
    """
    if not 0 <= index < len(visible):
        names = ", ".join(gpu.name for gpu in visible) or "none"
        raise DeviceError(
            f"{host}: the plan gives this rank GPU {index}, but it sees {len(visible)} ({names}); "
            "request GPUs per node (--gpus-per-node), not per task, or add --gpu-bind=none"
        )
    return visible[index]


def announce_gpu(index: int | None, environ: MutableMapping[str, str]) -> None:
    """Tell the environments of this rank which GPU it has: its ordinal is in HPCRL_GPU.

    A MIG instance, which only its own mask makes visible, isn't announced.

    Args:
      index: of the GPU within the node, by the topology; None: the rank has none.
      environ: of this process.
    """
    environ.pop("HPCRL_GPU", None)
    if index is None:
        return
    backend = torch_backend()
    visible = visible_gpus(environ, detect_gpu_count(backend), backend)
    if index < len(visible) and visible[index].pin is None:
        environ["HPCRL_GPU"] = str(visible[index].ordinal)


def detect_gpu_count(backend: Backend, dev: Path = Path("/dev")) -> int:
    """Count the GPUs whose device files this process can open.

    Opening is the test because Slurm's device cgroup leaves the files of other jobs' GPUs
    visible and refuses to open them.

    Args:
      backend: which vendor's files to try; "none" gives 0.
      dev: folder of the device files.
    """
    if backend == "cuda":
        pattern = "nvidia[0-9]*"
    elif backend == "hip" and (dev / "kfd").exists():
        pattern = "dri/renderD[0-9]*"  # codespell:ignore
    else:
        return 0
    return sum(1 for path in glob.glob(str(dev / pattern)) if _can_open(path))


def torch_backend() -> Backend:
    """Return what the installed torch was built for, without importing it (which costs seconds)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "none"
    return backend_of_version_file(Path(spec.origin).with_name("version.py"))


def backend_of_version_file(path: Path) -> Backend:
    """Return the backend that torch's `version.py` at `path` names; "none" when unreadable."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return "none"
    for name in ("hip", "cuda"):
        if re.search(rf"^{name}\b[^=\n]*=\s*['\"]\d", text, re.MULTILINE):
            return "hip" if name == "hip" else "cuda"
    return "none"


def _masked(mask: str, names: list[str]) -> list[str]:
    """Apply one mask variable to the GPUs that are left; indices count among `names`."""
    kept: list[str] = []
    entries = [entry.strip() for entry in mask.split(",")]
    prefix = next((p for p in ("GPU-", "MIG-") if entries[0].startswith(p)), "")
    for entry in entries:
        if prefix:
            name = entry if entry.startswith(prefix) else None
        else:
            name = names[int(entry)] if entry.isdecimal() and int(entry) < len(names) else None
        if name is None:
            break
        if name in kept:
            return []
        kept.append(name)
    return kept


def _step_gpus(environ: Mapping[str, str], detected_count: int) -> list[int]:
    entries = environ.get("SLURM_STEP_GPUS", "").split(",")
    ids = [int(entry) for entry in entries if entry.strip().isdecimal()]
    # With as many devices as the step owns, a cgroup has renumbered them from 0.
    confined = len(ids) >= detected_count or any(i >= detected_count for i in ids)
    return list(range(detected_count)) if not ids or confined else ids


def _can_open(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return False
    return True
