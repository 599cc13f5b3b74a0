"""`python -m services.worker.roofline JSON`: measures what the JSON asks for (`findings.Asked`), a finding a line.

Started by `baton bench roofline` and `baton bench kernels`, which show what comes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import assert_never

import msgspec

from services.worker.roofline.findings import Asked, Finding, KernelsAsked, Refused, StepsAsked


def main(arguments: list[str]) -> int:
    """0 where everything was measured, 1 where it could not be, 2 where the question is none."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        asked = msgspec.json.decode(arguments[0], type=Asked)
    except msgspec.MsgspecError as error:
        print(error, file=sys.stderr)
        return 2
    from services.worker.roofline.chosen import CannotMeasure

    try:
        for finding in _findings(asked):
            _tell(finding)
    except CannotMeasure as error:
        _tell(Refused(str(error)))
        return 1
    return 0


def _findings(asked: Asked) -> Iterator[Finding]:
    # torch is imported behind the first check, so that a wrong question is answered at once.
    match asked:
        case StepsAsked():
            from services.worker.roofline.steps import measure_steps

            return measure_steps(asked)
        case KernelsAsked():
            from services.worker.roofline.kernels import measure_kernels

            return measure_kernels(asked)
        case _:
            assert_never(asked)


def _tell(finding: Finding) -> None:
    print(msgspec.json.encode(finding).decode(), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
