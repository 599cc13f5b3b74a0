"""What `--device` may be. Imports no torch, so that a stack is refused before anything of it starts."""

from __future__ import annotations

from shared.plugins.entry_points import find_plugin

GROUP = "baton.platforms"
BUILT_IN = ("auto", "cpu", "cuda", "sim")
"""sim is no platform: it needs no PyTorch."""


def check_device_name(name: str) -> None:
    """Raises PluginError where no device is called so, built in or of one installed package."""
    if name not in BUILT_IN:
        find_plugin(GROUP, name, built_in=BUILT_IN)
