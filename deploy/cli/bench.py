"""`baton bench`: runs `services.bench`, told where the running stack is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def run_bench(argv: Sequence[str]) -> None:
    """Ends with the bench's own status."""
    finished = subprocess.run([sys.executable, "-m", "services.bench", *argv], check=False)
    raise SystemExit(finished.returncode)
