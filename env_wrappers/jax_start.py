"""Starts JAX for environments: on few threads, and on a GPU only where this process has one.

XLA reads its settings once, when its first device is asked for, so one process has one setting.
Nothing here is imported with the package: `start_jax` imports JAX.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from env_wrappers.errors import EnvError
from env_wrappers.options import check_choice, check_range

# num_threads: threads of XLA's pool, which computes the steps, in this process.
# device: "auto" computes on the GPU that the job gives this process (its number is in HPCRL_GPU),
#   if the JAX installed can, else on the CPU; "gpu" on that GPU or the first that there is.
# gpu_memory_fraction: of the GPU, the most that JAX takes; it isn't taken beforehand.
# compilation_cache: folder in which compiled programs are kept for later processes; empty: none.
JAX_OPTIONS: dict[str, Any] = {
    "num_threads": 1,
    "device": "auto",
    "gpu_memory_fraction": 0.25,
    "compilation_cache": "",
}


class _Settings(NamedTuple):
    platform: str
    num_threads: int
    gpu: str
    gpu_memory_fraction: float


_started: _Settings | None = None


def start_jax(name: str, options: Mapping[str, Any]) -> Any:
    """Import JAX with `options`, all of `JAX_OPTIONS`, and return the module.

    Args:
      name: of the environment, for messages.
      options: those and others.

    Raises:
      EnvError: an option cannot work, or this process has started JAX with others.
    """
    global _started
    check_range(name, options, "num_threads", 1)
    check_choice(name, options, "device", ("auto", "cpu", "gpu"))
    check_range(name, options, "gpu_memory_fraction", 0.01, 1.0)
    wanted = _settings(options, os.environ)
    if _started is None:
        os.environ.update(jax_environment(wanted, os.environ))
        _started = wanted
    elif _started != wanted:
        raise EnvError(
            f"{name}: JAX runs in this process with {_text(_started)} already, and can't be "
            f"started a second time with {_text(wanted)}: give all environments the same options"
        )
    import jax

    # The variable is too late where something else has imported JAX.
    jax.config.update("jax_platforms", wanted.platform)
    if options["compilation_cache"]:
        jax.config.update("jax_compilation_cache_dir", options["compilation_cache"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    try:
        jax.devices()
    except RuntimeError as error:
        raise EnvError(
            f"{name}: JAX finds no device {wanted.platform!r} ({error}); "
            "set the option device to cpu, or install JAX for this GPU (jax[cuda12])"
        ) from error
    return jax


def _settings(options: Mapping[str, Any], environ: Mapping[str, str]) -> _Settings:
    given = environ.get("HPCRL_GPU", "")
    has_one = given != "" and importlib.util.find_spec("jax_plugins") is not None
    on_gpu = options["device"] == "gpu" or (options["device"] == "auto" and has_one)
    if not on_gpu:
        return _Settings("cpu", options["num_threads"], "", 0.0)
    platform = "rocm" if os.path.exists("/dev/kfd") else "cuda"
    return _Settings(platform, options["num_threads"], given or "0", options["gpu_memory_fraction"])


def jax_environment(settings: _Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that JAX and XLA must find before their first use.

    Args:
      settings: what they shall say.
      environ: of this process; other flags of XLA in it stay.
    """
    flags = [
        flag
        for flag in shlex.split(environ.get("XLA_FLAGS", ""))
        if not flag.startswith("--xla_cpu_multi_thread_eigen")
    ]
    if settings.num_threads == 1:
        flags.append("--xla_cpu_multi_thread_eigen=false")
    threads = str(settings.num_threads)
    variables = {
        "JAX_PLATFORMS": settings.platform,
        "XLA_FLAGS": " ".join(flags),
        "NPROC": threads,  # the size of XLA's pools
        "PJRT_NPROC": threads,
        "TF_CPP_MIN_LOG_LEVEL": environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
    }
    if settings.platform != "cpu":
        variables |= {
            f"JAX_{settings.platform.upper()}_VISIBLE_DEVICES": settings.gpu,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{settings.gpu_memory_fraction:g}",
        }
    return variables


def _text(settings: _Settings) -> str:
    where = settings.platform + (f" {settings.gpu}" if settings.gpu else "")
    return f"{settings.num_threads} threads on {where}"
