"""`python -m tests.support.worker.weight_holder FOLDER`: loads a model whose weights are shared, says what its tokens
and its memory are, in a line, and holds it until its input ends."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path

from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend


def shared_kilobytes(pid: int) -> dict[str, int]:
    """Of a process's mappings of shared weights, by the names in smaps (proc_pid_smaps(5))."""
    found: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "baton-weights" in line
        elif inside and (field := re.match(r"(\w+): +(\d+) kB", line)):
            found[field[1]] = found.get(field[1], 0) + int(field[2])
    return found


def main() -> None:
    """See the module."""
    logging.basicConfig(level=logging.INFO)
    driver = Driver(tiny_backend(Path(sys.argv[1]), ops="native", dtype="float32", share_weights=True))
    sequence = driver.add(list(range(3, 40)), 8)
    driver.run()
    print(json.dumps({"tokens": sequence.output, "memory": shared_kilobytes(os.getpid())}), flush=True)
    if sys.stdin.readline():
        driver.add(list(range(3, 40)), 8)
        driver.run()
        print(json.dumps({"memory": shared_kilobytes(os.getpid())}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
