"""Which platforms there are: those of this folder, and those that installed packages name in `baton.platforms`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from services.worker.platforms.cpu import CpuPlatform
from services.worker.platforms.cuda import CudaPlatform
from services.worker.platforms.interface import Platform
from services.worker.platforms.names import BUILT_IN, GROUP
from shared.plugins.entry_points import PluginError, load_class

_OURS: dict[str, type[Platform]] = {"cpu": CpuPlatform, "cuda": CudaPlatform}

T = TypeVar("T")


class PlatformUnavailable(Exception):
    """There is no such device here; the text names it and says why."""


def open_platform(name: str, *, index: int, rank: int, world_size: int) -> Platform:
    """The device of a rank; "auto" is a GPU where there is one, else the CPU. `index`: the rank's number among those of
    this host. Raises PlatformUnavailable."""
    if name == "auto":
        name = "cpu" if CudaPlatform.why_unavailable() else "cuda"
    kind = _kind(name)
    if reason := _asked(name, kind.why_unavailable):
        raise PlatformUnavailable(f"device = {name}: {reason}")
    count = _asked(name, kind.device_count)
    if count is None:
        return _named(name, _asked(name, lambda: kind(0)))
    if index >= count and world_size > count:
        raise PlatformUnavailable(
            f"device = {name}: rank {rank} has no device of its own: it is number {index} here, {count} are there"
        )
    # More engines than devices share them; the ranks of one engine, whose numbers follow each other, never do.
    return _named(name, _asked(name, lambda: kind(index % count)))


def built_in_platform(device: torch.device | str) -> Platform:
    """The platform of a device of PyTorch's, "cpu" or one of "cuda". Raises PlatformUnavailable for another one."""
    device = torch.device(device)
    if device.type not in _OURS:
        raise PlatformUnavailable(f"device = {device}: it must be one of {', '.join(_OURS)}")
    return _OURS[device.type](device.index or 0)


def _kind(name: str) -> type[Platform]:
    if name in _OURS:
        return _OURS[name]
    try:
        return load_class(GROUP, name, Platform, built_in=BUILT_IN).value  # type: ignore[type-abstract]
    except PluginError as error:
        raise PlatformUnavailable(f"device = {name}: {error}") from None


def _named(name: str, platform: Platform) -> Platform:
    platform.name = name
    return platform


def _asked(name: str, question: Callable[[], T]) -> T:
    try:
        return question()
    except Exception as error:  # whatever a foreign package raises
        why = str(error) if isinstance(error, ValueError) else repr(error)
        raise PlatformUnavailable(f"device = {name}: {why}") from None
