"""On the PYTHONPATH of a stack under test: while the file $CHANGEOVER_STRIKE is there, the next rank that changes a
layer's experts takes it away, and is killed when it has its new experts and has not said which they are.

Python imports this at its start, long before the class exists; a finder wraps it when it is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

from tests.support.imported_modules import change_when_imported

MODULE = "services.worker.models.expert_parallel.local_experts"


def strike(module: Any) -> None:
    """Experts are replaced by an assignment to `packed` and one to `local`: in between them whoever strikes dies."""
    experts = module.RankExperts
    packed = experts.packed

    def replaced(self: Any, value: Any) -> None:
        changed = hasattr(self, "local")  # not while it is made
        packed.__set__(self, value)
        if changed:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.environ["CHANGEOVER_STRIKE"])
                os.kill(os.getpid(), signal.SIGKILL)

    experts.packed = property(packed.__get__, replaced)


if "CHANGEOVER_STRIKE" in os.environ:
    change_when_imported({MODULE: strike})
