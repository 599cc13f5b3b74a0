"""Whether the NVIDIA driver, the GPUs and the installed build of PyTorch fit together, and what mends it. No GPU is
touched: the driver is asked by `nvidia-smi`, and PyTorch says what it was built for."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from deploy.cli.machine_checks import Finding, TorchInstallation, fail, ok, warn

NVIDIA_SMI = "nvidia-smi"
QUERY = ("--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader")
SMI_TIMEOUT = 30.0
MIN_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest driver that runs each major version of CUDA, minor ones included ("minor version compatibility").
https://docs.nvidia.com/deploy/cuda-compatibility/"""
MIN_TRITON = (7, 0)
"""Compute capability below which Triton compiles no kernels."""
CHOOSE_TORCH = "https://pytorch.org/get-started/locally"

Capability = tuple[int, int]


class Gpu(NamedTuple):
    """One GPU, as the driver describes it."""

    name: str
    capability: Capability | None
    """None: a driver before 470 does not say."""


class GpuDriver(NamedTuple):
    """What `nvidia-smi` says."""

    version: str
    cuda: tuple[int, int] | None
    """The newest CUDA that the driver knows; None where it does not say."""
    gpus: tuple[Gpu, ...]


def read_driver() -> GpuDriver | str | None:
    """Asks the driver. A text says why there is no answer; None where there is no `nvidia-smi`."""
    if shutil.which(NVIDIA_SMI) is None:
        return None
    try:
        answers = [
            subprocess.run([NVIDIA_SMI, *options], capture_output=True, text=True, timeout=SMI_TIMEOUT, check=False)
            for options in (QUERY, ())
        ]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if failed := next((each for each in answers if each.returncode), None):
        return (failed.stdout or failed.stderr).strip().splitlines()[0] if failed.stdout or failed.stderr else "no word"
    return parse_driver(answers[0].stdout, answers[1].stdout)


def parse_driver(query: str, summary: str) -> GpuDriver:
    """Of the lines that `nvidia-smi` prints for QUERY, and of its table, whose head has the CUDA version."""
    rows = [[cell.strip() for cell in line.rsplit(",", 2)] for line in query.splitlines() if line.count(",") >= 2]
    cuda = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", summary)
    return GpuDriver(
        version=rows[0][1] if rows else "",
        cuda=None if cuda is None else (int(cuda[1]), int(cuda[2])),
        gpus=tuple(Gpu(name, _capability(text)) for name, _, text in rows),
    )


def _capability(text: str) -> Capability | None:
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    return None if found is None else (int(found[1]), int(found[2]))


def judged(driver: GpuDriver | str | None, torch: TorchInstallation | None, visible: str | None = None) -> Finding:
    """The finding of `baton doctor`. `torch`: what the installed PyTorch says of itself, None without one; `visible`:
    CUDA_VISIBLE_DEVICES."""
    if driver is None:
        if torch is not None and torch.gpus:  # of another maker, or its tool is not in the path
            return ok("GPU", ", ".join(torch.gpus))
        return ok("GPU", "none; models run on the CPU")
    if isinstance(driver, str):
        return warn("GPU", f"nvidia-smi fails: {driver}", "load the driver (modprobe nvidia), or install a newer one")
    if not driver.gpus:
        return ok("GPU", f"driver {driver.version or 'without a version'}, and no GPU; models run on the CPU")
    if torch is None:
        return warn("GPU", _described(driver), "pip install 'baton-serve[worker]': torch computes on it")
    problem = next(_problems(driver, torch), None)
    if problem is not None:
        return problem
    if not torch.gpus:
        if visible is not None:
            return warn("GPU", f"CUDA_VISIBLE_DEVICES={visible!r} hides all of {_described(driver)}", "unset it")
        return warn(
            "GPU",
            f"{_described(driver)} fit torch {torch.version}, which sees none",
            "in a container: --gpus all; otherwise restart what holds them, or the machine after a driver's update",
        )
    return ok("GPU", f"{_described(driver)}; torch {torch.version} for CUDA {torch.cuda}")


def _problems(driver: GpuDriver, torch: TorchInstallation) -> Iterator[Finding]:
    """What keeps this PyTorch from these GPUs, the most basic first."""
    newest = "" if driver.cuda is None else f" for CUDA {_dotted(driver.cuda)} or older"
    if torch.cuda is None:
        yield warn(
            "GPU",
            f"{_described(driver)}, and torch {torch.version} computes on processors alone",
            f"install a build of torch{newest}: {CHOOSE_TORCH}",
        )
        return
    built = tuple(int(part) for part in torch.cuda.split(".")[:2])
    if driver.cuda is not None and driver.cuda[0] < built[0]:
        least = MIN_DRIVERS.get(built[0])
        yield fail(
            "GPU",
            f"driver {driver.version} runs CUDA up to {_dotted(driver.cuda)}, "
            f"and torch {torch.version} needs {torch.cuda}",
            f"install driver {least or 'of CUDA ' + torch.cuda} or newer, or a build of torch{newest}: {CHOOSE_TORCH}",
        )
    for number, gpu in enumerate(driver.gpus):
        if gpu.capability is None:
            continue
        if torch.architectures and not is_covered(gpu.capability, torch.architectures):
            yield _uncovered(number, gpu, torch)
        elif gpu.capability < MIN_TRITON:
            yield fail(
                "GPU",
                f"GPU {number} ({gpu.name}) has compute capability {_dotted(gpu.capability)}; kernels need 7.0",
                f"--device cpu, or leave it out: CUDA_VISIBLE_DEVICES without {number}",
            )


def _uncovered(number: int, gpu: Gpu, torch: TorchInstallation) -> Finding:
    assert gpu.capability is not None
    known = sorted(capability for each in torch.architectures if (capability := _of_architecture(each)) is not None)
    too_new = bool(known) and gpu.capability > known[-1]
    return fail(
        "GPU",
        f"GPU {number} ({gpu.name}) has compute capability {_dotted(gpu.capability)}; "
        f"torch {torch.version} has kernels for {', '.join(torch.architectures)}",
        f"install a newer build of torch, for a newer CUDA: {CHOOSE_TORCH}"
        if too_new
        else f"--device cpu, or leave it out: CUDA_VISIBLE_DEVICES without {number}",
    )


def is_covered(capability: Capability, architectures: Sequence[str]) -> bool:
    """Whether code for one of these runs there: binaries (`sm_80`) on the same major version from that minor one on,
    those with a letter (`sm_90a`) on that one alone, intermediate code (`compute_90`) on all later ones."""
    for architecture in architectures:
        built = _of_architecture(architecture)
        if built is None:
            continue
        exact = architecture[-1].isalpha()
        if capability == built or (not exact and architecture.startswith("compute_") and capability >= built):
            return True
        if not exact and architecture.startswith("sm_") and capability[0] == built[0] and capability >= built:
            return True
    return False


def _of_architecture(name: str) -> Capability | None:
    """`sm_90a` and `compute_120` are 9.0 and 12.0: the last digit is the minor version."""
    found = re.fullmatch(r"(?:sm|compute)_(\d+)(\d)[a-z]?", name)
    return None if found is None else (int(found[1]), int(found[2]))


def _described(driver: GpuDriver) -> str:
    said = []
    for gpu, count in Counter(driver.gpus).items():
        number = f"{count} × " if count > 1 else ""
        said.append(number + gpu.name + ("" if gpu.capability is None else f" ({_dotted(gpu.capability)})"))
    cuda = "" if driver.cuda is None else f", CUDA up to {_dotted(driver.cuda)}"
    return f"{', '.join(said)}, driver {driver.version}{cuda}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
