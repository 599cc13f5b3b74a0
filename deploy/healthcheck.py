"""A container's health: 0 while its service says that it is ready, or drains. Standard library only, one file.

Reads the service's own metrics: the phase in there is what the actor itself holds, so an engine without its workers
is not healthy although its process lives.

    python healthcheck.py PORT
"""

from __future__ import annotations

import sys
import urllib.request

HEALTHY = ('phase="ready"', 'phase="draining"')


def is_healthy(metrics: str) -> bool:
    """Whether metrics in Prometheus's text format say that the service is ready or draining."""
    lines = (line for line in metrics.splitlines() if line.startswith("baton_phase{"))
    return any(line.endswith(" 1.0") and any(phase in line for phase in HEALTHY) for line in lines)


def main(port: str) -> int:
    """The exit status: 0 while healthy, 1 otherwise, also if there is no answer within 3 seconds."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=3) as response:
            return 0 if is_healthy(response.read().decode()) else 1
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
