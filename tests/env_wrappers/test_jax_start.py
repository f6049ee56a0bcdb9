"""What JAX is told before it starts; needs no JAX."""

import importlib.util

import pytest

from env_wrappers import jax_start
from env_wrappers.errors import EnvError
from env_wrappers.jax_start import JAX_OPTIONS, jax_environment, start_jax


def variables(environ=None, **options):
    environ = environ or {}
    return jax_environment(jax_start._settings({**JAX_OPTIONS, **options}, environ), environ)


def test_without_a_gpu_of_its_own_a_process_computes_on_the_cpu():
    told = variables({"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "0,1"})
    assert told["JAX_PLATFORMS"] == "cpu"
    assert not any("VISIBLE" in name for name in told)


def test_the_gpu_that_the_job_gives_is_taken_where_jax_has_a_plugin_for_it(monkeypatch):
    found = {"jax_plugins": object()}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    told = variables({"HPCRL_GPU": "2"}, gpu_memory_fraction=0.5)
    assert told["JAX_PLATFORMS"] in ("cuda", "rocm")
    assert told[f"JAX_{told['JAX_PLATFORMS'].upper()}_VISIBLE_DEVICES"] == "2"
    assert told["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert told["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert variables({"HPCRL_GPU": "2"}, device="cpu")["JAX_PLATFORMS"] == "cpu"
    found.clear()
    assert variables({"HPCRL_GPU": "2"})["JAX_PLATFORMS"] == "cpu"


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_are_bounded_and_other_flags_kept(threads):
    environ = {"XLA_FLAGS": "--xla_a=1 --xla_cpu_multi_thread_eigen=true", "NPROC": "64"}
    told = variables(environ, num_threads=threads)
    assert told["NPROC"] == told["PJRT_NPROC"] == str(threads)
    flags = told["XLA_FLAGS"].split()
    assert "--xla_a=1" in flags
    assert ("--xla_cpu_multi_thread_eigen=false" in flags) == (threads == 1)
    assert "--xla_cpu_multi_thread_eigen=true" not in flags


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"num_threads": 0}, "num_threads must be at least 1, got 0"),
        ({"device": "tpu"}, "device must be one of auto, cpu, gpu, got 'tpu'"),
        ({"gpu_memory_fraction": 2.0}, "gpu_memory_fraction must be from 0.01 to 1.0, got 2.0"),
    ],
)
def test_wrong_options_are_told(option, message):
    with pytest.raises(EnvError, match=message):
        start_jax("brax:ant", {**JAX_OPTIONS, **option})


def test_a_process_has_one_setting(monkeypatch):
    started = jax_start._settings({**JAX_OPTIONS, "num_threads": 2}, {})
    monkeypatch.setattr(jax_start, "_started", started)
    with pytest.raises(EnvError, match=r"with 2 threads on cpu already, .* with 5 threads on cpu"):
        start_jax("brax:ant", {**JAX_OPTIONS, "num_threads": 5})
