"""How `make test` gives test files to its processes."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

TOGETHER = ("tests/integration/shared_stacks/",)
"""Folders whose fixtures are costly and serve all of their files."""


class SharedStackScheduling(LoadFileScheduling):  # type: ignore[misc]
    """Each process takes whole files, and a folder of TOGETHER as if it were one."""

    def _split_scope(self, nodeid: str) -> str:
        """The scope of a test: what has the same goes to the same process."""
        folder = next((each for each in TOGETHER if nodeid.startswith(each)), None)
        return folder or str(super()._split_scope(nodeid))
