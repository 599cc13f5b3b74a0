"""Traces which of the project's functions one chat request, and one decode step, run through.

    python tests/architecture/walk.py [CHECKOUT]            prints both walks, file by file
    python tests/architecture/walk.py [CHECKOUT] --json     for `house.py`

All services run in one process (`services.offline`), with the demo model. A walk is what is called between request and
answer; what is called at least 100 times for 200 tokens belongs to each decode step. This file needs nothing of the
project but the checkout that it is given, so that an older one can be traced, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

TOKENS, MANY_TOKENS = 8, 200
CALLS_OF_A_STEP = 100
"""Of `MANY_TOKENS`: steps yield more than one token at times, so that there are fewer of them."""


class Call(NamedTuple):
    """A function of the project."""

    file: str
    function: str


Walk = Mapping[Call, int]
"""How often each was called, in the order of the first call."""


class Recorder:
    """Owns the counts. Listens in all threads that are started after `install`."""

    def __init__(self, checkout: Path) -> None:
        self._root = f"{checkout}/"
        self._calls: dict[Call, int] = {}
        self._records = False

    def install(self) -> None:
        """Begins to listen, before anything of the project is imported."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def of(self, act: Callable[[], object]) -> dict[Call, int]:
        """What is called while `act` runs."""
        self._calls = {}
        self._records = True
        act()
        self._records = False
        return self._calls

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        if not self._records or event != "call":
            return
        code = frame.f_code
        path = code.co_filename
        if path.startswith(self._root) and "/.venv" not in path and not code.co_name.startswith("<"):
            call = Call(path[len(self._root) :], code.co_qualname)
            self._calls[call] = self._calls.get(call, 0) + 1


def walks(checkout: Path) -> dict[str, Walk]:
    """`request` and `step`, of the project in `checkout`. To be called once in a process, which ends soon after."""
    sys.path[0] = str(checkout)
    recorder = Recorder(checkout)
    recorder.install()
    from services.offline import LLM, SamplingParams

    question: Any = [[{"role": "user", "content": "What is the capital of France?"}]]
    with LLM(str(checkout / "deploy" / "demo" / "model")) as llm:

        def ask(tokens: int) -> object:
            return llm.chat(question, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))

        ask(TOKENS)
        request = recorder.of(lambda: ask(TOKENS))
        many = recorder.of(lambda: ask(MANY_TOKENS))
    return {"request": request, "step": {call: times for call, times in many.items() if times >= CALLS_OF_A_STEP}}


def shown(name: str, walk: Walk) -> str:
    """A line for each file, in the order in which the walk comes to them, and its functions."""
    files: dict[str, list[str]] = {}
    for call, times in walk.items():
        files.setdefault(call.file, []).append(call.function if times == 1 else f"{call.function} ×{times}")
    lines = [f"{name}: {len(walk)} functions in {len(files)} files"]
    lines += [f"  {file}\n      {', '.join(functions)}" for file, functions in files.items()]
    return "\n".join(lines)


def main() -> None:
    """Prints both walks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", default=Path(__file__).parents[2])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = walks(options.checkout.resolve())
    if options.json:
        print(json.dumps({name: [[*call, times] for call, times in walk.items()] for name, walk in found.items()}))
        return
    print(shown(f"a chat request of {TOKENS} tokens", found["request"]))
    print()
    print(shown("a decode step", found["step"]))


if __name__ == "__main__":
    main()
