"""What `baton doctor` makes of drivers, GPUs and builds of PyTorch that do or do not fit together."""

from __future__ import annotations

import pytest

from deploy.cli.diagnosis.gpu_driver import Gpu, GpuDriver, is_covered, judged, parse_driver
from deploy.cli.machine_checks import TorchInstallation

H100_QUERY = "NVIDIA H100 80GB HBM3, 550.54.15, 9.0\nNVIDIA H100 80GB HBM3, 550.54.15, 9.0\n"
H100_TABLE = """\
Thu Nov 26 12:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
"""
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
"""Of a build of PyTorch for CUDA 12.8."""
H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0))


def driver(*gpus: Gpu, version: str = "570.86.10", cuda: tuple[int, int] | None = (12, 8)) -> GpuDriver:
    return GpuDriver(version, cuda, gpus)


def torch(*gpus: str, version: str = "2.11.0+cu128", cuda: str | None = "12.8") -> TorchInstallation:
    return TorchInstallation(version, 4, gpus, cuda, ARCHITECTURES if cuda else ())


def test_what_nvidia_smi_prints_is_read() -> None:
    assert parse_driver(H100_QUERY, H100_TABLE) == GpuDriver("550.54.15", (12, 4), (H100, H100))


def test_what_it_does_not_say_is_not_guessed() -> None:
    found = parse_driver("Quadro, a model with, commas, 470.1, [N/A]\n", "CUDA Version: N/A")
    assert found == GpuDriver("470.1", None, (Gpu("Quadro, a model with, commas", None),))
    assert parse_driver("No devices were found\n", H100_TABLE) == GpuDriver("", (12, 4), ())


def test_all_that_fits_is_well() -> None:
    found = judged(driver(H100, H100), torch(H100.name, H100.name))
    assert (found.status, found.remedy) == ("ok", "")
    assert found.detail == (
        "2 × NVIDIA H100 80GB HBM3 (9.0), driver 570.86.10, CUDA up to 12.8; torch 2.11.0+cu128 for CUDA 12.8"
    )


def test_an_older_minor_version_of_cuda_is_enough() -> None:
    assert judged(driver(H100, version="550.54.15", cuda=(12, 4)), torch(H100.name)).status == "ok"


@pytest.mark.parametrize(
    ("cuda", "least"),
    [("12.8", "install driver 525.60.13 or newer"), ("13.0", "install driver 580.65.06 or newer")],
)
def test_a_driver_of_an_older_major_version_is_named_with_the_one_that_is_needed(cuda: str, least: str) -> None:
    found = judged(driver(H100, version="470.82.01", cuda=(11, 4)), torch(cuda=cuda))
    assert found.status == "fail"
    assert found.detail == f"driver 470.82.01 runs CUDA up to 11.4, and torch 2.11.0+cu128 needs {cuda}"
    assert found.remedy.startswith(least)
    assert "or a build of torch for CUDA 11.4 or older: https://pytorch.org" in found.remedy


def test_a_build_for_processors_beside_a_gpu_is_named_with_what_the_driver_runs() -> None:
    found = judged(driver(H100), torch(version="2.11.0+cpu", cuda=None))
    assert (found.status, "computes on processors alone" in found.detail) == ("warn", True)
    assert found.remedy == "install a build of torch for CUDA 12.8 or older: https://pytorch.org/get-started/locally"


def test_a_gpu_older_than_all_kernels_is_left_out() -> None:
    found = judged(driver(H100, Gpu("Tesla V100-SXM2-32GB", (7, 0))), torch(H100.name))
    assert found.status == "fail"
    assert (
        "GPU 1 (Tesla V100-SXM2-32GB) has compute capability 7.0; torch 2.11.0+cu128 has kernels for sm_75"
        in found.detail
    )
    assert found.remedy == "--device cpu, or leave it out: CUDA_VISIBLE_DEVICES without 1"


def test_a_gpu_newer_than_all_kernels_needs_a_newer_build() -> None:
    old = TorchInstallation("2.11.0+cu126", 4, (), "12.6", ("sm_80", "sm_90"))
    found = judged(driver(Gpu("NVIDIA B200", (10, 0))), old)
    assert (found.status, found.remedy.startswith("install a newer build of torch")) == ("fail", True)


def test_a_gpu_without_triton_is_left_out_even_where_torch_has_kernels() -> None:
    old = TorchInstallation("2.11.0+cu126", 4, ("Tesla P100",), "12.6", ("sm_60", "sm_90"))
    found = judged(driver(Gpu("Tesla P100", (6, 0))), old)
    assert (found.status, "kernels need 7.0" in found.detail) == ("fail", True)


def test_a_gpu_that_fits_and_is_not_seen() -> None:
    assert judged(driver(H100), torch(), "").detail.startswith("CUDA_VISIBLE_DEVICES='' hides all of NVIDIA H100")
    found = judged(driver(H100), torch())
    assert (found.status, "--gpus all" in found.remedy) == ("warn", True)


def test_a_driver_that_does_not_answer() -> None:
    found = judged("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", torch())
    assert (found.status, found.remedy.startswith("load the driver")) == ("warn", True)


def test_without_a_gpu_nothing_is_missing() -> None:
    assert (
        judged(None, None).status == judged(None, torch(cuda=None)).status == judged(driver(), torch()).status == "ok"
    )


@pytest.mark.parametrize(
    ("capability", "architectures", "covered"),
    [
        ((8, 9), ("sm_80",), True),  # of the same major version
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_86",), False),
        ((9, 0), ("compute_80",), True),  # compiled for it when it is loaded
        ((9, 0), ("sm_90a",), True),
        ((9, 1), ("sm_90a",), False),
        ((10, 3), ("sm_100",), True),
        ((12, 0), ("sm_100", "gfx90a"), False),
        ((12, 1), ("compute_120",), True),
    ],
)
def test_which_code_runs_where(capability: tuple[int, int], architectures: tuple[str, ...], covered: bool) -> None:
    assert is_covered(capability, architectures) == covered
