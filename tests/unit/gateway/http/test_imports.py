"""What a gateway's program has imported before it runs: forked ones share it (ADR 214)."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import uvicorn
import services.gateway.__main__
from services.gateway.http.connection import Connection
before = set(sys.modules)
uvicorn.Config(print, http=Connection, ws="none", lifespan="off", log_config=None).load()
print(sorted(set(sys.modules) - before))
"""


def test_a_server_imports_nothing_as_it_starts() -> None:
    said = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    assert said.stdout.strip() == "[]"
