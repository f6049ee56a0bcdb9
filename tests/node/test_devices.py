"""GPU masks in every form that sites use, and the choice among what they leave."""

import pytest

from hpcrl.node import devices
from hpcrl.node.devices import (
    DeviceError,
    VisibleGpu,
    announce_gpu,
    backend_of_version_file,
    choose_device,
    detect_gpu_count,
    torch_backend,
    visible_gpus,
)

UUID_A = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
UUID_B = "GPU-1f2e3d4c-0000-1111-2222-333344445555"
MIG_A = "MIG-b1028956-cfa2-0990-bf4a-5da9abb51763"
MIG_OLD = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0"


def _names(env, count, backend="cuda"):
    gpus = visible_gpus(env, count, backend)
    assert all(gpu.pin is None for gpu in gpus)
    assert [gpu.ordinal for gpu in gpus] == list(range(len(gpus)))
    return [gpu.name for gpu in gpus]


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        ("0,1,2,3", ["0", "1", "2", "3"]),
        ("2", ["2"]),
        ("3,1", ["3", "1"]),
        (" 1 , 0 ", ["1", "0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        # The list ends at the first entry that is not a GPU.
        ("0,-1,1", ["0"]),
        ("1,7,0", ["1"]),
        # An entry given twice hides all.
        ("1,1", []),
        (f"{UUID_A},{UUID_B}", [UUID_A, UUID_B]),
        (UUID_B, [UUID_B]),
        (f"{UUID_A},0", [UUID_A]),
        (f"{UUID_A},{UUID_A}", []),
    ],
)
def test_cuda_mask_is_read_as_cuda_reads_it(mask, names):
    assert _names({"CUDA_VISIBLE_DEVICES": mask}, 4) == names


def test_without_a_mask_all_detected_gpus_are_visible():
    assert _names({}, 4) == ["0", "1", "2", "3"]
    assert _names({}, 0) == []


def test_a_mask_without_gpus_or_without_a_gpu_build_of_torch_gives_none():
    assert _names({"CUDA_VISIBLE_DEVICES": "0,1"}, 0) == []
    assert _names({"CUDA_VISIBLE_DEVICES": "0,1"}, 4, "none") == []


@pytest.mark.parametrize("mask", [f"{MIG_A},{MIG_OLD}", MIG_A])
def test_each_mig_instance_is_pinned_since_a_process_can_use_only_one(mask):
    # One physical GPU holds several instances.
    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": mask}, 1)
    assert gpus == tuple(VisibleGpu(name, 0, pin=name) for name in mask.split(","))


@pytest.mark.parametrize(
    ("env", "names"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, ["2", "3"]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
        # The second mask counts among what the first leaves.
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, ["3"]),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "2"}, []),
        ({"CUDA_VISIBLE_DEVICES": "1"}, ["1"]),
        ({"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}, ["0"]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-aa,GPU-bb", "HIP_VISIBLE_DEVICES": "1"}, ["GPU-bb"]),
    ],
)
def test_rocm_masks_are_applied_one_within_the_other(env, names):
    assert _names(env, 4, "hip") == names


def test_rocm_mask_does_not_hide_nvidia_gpus():
    assert _names({"ROCR_VISIBLE_DEVICES": "1"}, 2) == ["0", "1"]


def test_slurms_step_gpus_hold_where_devices_are_not_confined():
    # The step owns GPUs 2 and 3 of 4; torch sees all four, so that is how it numbers them.
    owned = visible_gpus({"SLURM_STEP_GPUS": "2,3"}, 4)
    assert owned == (VisibleGpu("2", 2), VisibleGpu("3", 3))
    # Confined to two devices, they are renumbered from 0.
    assert _names({"SLURM_STEP_GPUS": "2,3"}, 2) == ["0", "1"]
    assert _names({"SLURM_STEP_GPUS": "5"}, 2) == ["0", "1"]
    assert _names({"SLURM_STEP_GPUS": ""}, 2) == ["0", "1"]
    # A mask wins.
    assert _names({"SLURM_STEP_GPUS": "2,3", "CUDA_VISIBLE_DEVICES": "1"}, 4) == ["1"]


def test_the_planned_gpu_is_chosen_or_the_shortage_explained():
    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": "3,1"}, 4)
    assert choose_device(1, gpus) == VisibleGpu("1", 1)
    with pytest.raises(
        DeviceError, match=r"node7: the plan gives this rank GPU 2, .* sees 2 \(3, 1\)"
    ):
        choose_device(2, gpus, host="node7")
    with pytest.raises(DeviceError, match=r"sees 0 \(none\)"):
        choose_device(0, ())


def test_only_devices_that_open_are_counted(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia2").symlink_to(tmp_path / "gone")  # present but cannot be opened
    assert detect_gpu_count("cuda", tmp_path) == 3
    assert detect_gpu_count("none", tmp_path) == 0
    (tmp_path / "dri").mkdir()
    for name in ("renderD128", "renderD129", "card0"):
        (tmp_path / "dri" / name).touch()
    assert detect_gpu_count("hip", tmp_path) == 0
    (tmp_path / "kfd").touch()
    assert detect_gpu_count("hip", tmp_path) == 2


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "none"),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", "cuda"),
        ("cuda = '12.1'\nhip = None\n", "cuda"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2.41133-dd7f95766'\n", "hip"),
    ],
)
def test_torchs_backend_is_read_from_its_version_file(tmp_path, text, backend):
    path = tmp_path / "version.py"
    path.write_text("__version__ = '2.13.0'\n" + text)
    assert backend_of_version_file(path) == backend
    assert backend_of_version_file(tmp_path / "missing.py") == "none"


def test_torchs_backend_is_what_torch_itself_says():
    import torch

    expected = "hip" if torch.version.hip else "cuda" if torch.version.cuda else "none"
    assert torch_backend() == expected


@pytest.mark.parametrize(
    ("index", "mask", "told"),
    [
        (None, None, None),
        (1, None, "1"),
        (1, "3,2", "1"),
        (0, "", None),
        (0, MIG_A, None),  # visible by its own mask only
    ],
)
def test_environments_are_told_the_gpu_of_their_rank(monkeypatch, index, mask, told):
    monkeypatch.setattr(devices, "torch_backend", lambda: "cuda")
    monkeypatch.setattr(devices, "detect_gpu_count", lambda backend: 4)
    environ = {"HPCRL_GPU": "7"} | ({} if mask is None else {"CUDA_VISIBLE_DEVICES": mask})
    announce_gpu(index, environ)
    assert environ.get("HPCRL_GPU") == told
