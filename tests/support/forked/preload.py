"""What the program needs: nothing, a thread that makes forking unsafe, or what is not there."""

from __future__ import annotations

import threading
from collections.abc import Sequence


def preload(flags: Sequence[str]) -> None:
    if "threads" in flags:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    if "missing" in flags:
        raise ImportError("no such library")
