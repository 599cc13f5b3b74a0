"""`python -m services.worker.measure.roofline JSON`: measures what the JSON asks for (`wire.MeasureRequest`).

Prints a line of JSON for each finding. Started by `baton bench roofline` and `baton bench kernels`, which show them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import assert_never

import msgspec

from services.worker.measure.roofline.wire import Finding, KernelsRequest, MeasureRefused, MeasureRequest, StepsRequest


def main(arguments: list[str]) -> int:
    """0 where everything was measured, 1 where it could not be, 2 where the question is none."""
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        request = msgspec.json.decode(arguments[0], type=MeasureRequest)
    except msgspec.MsgspecError as error:
        print(error, file=sys.stderr)
        return 2
    from services.worker.measure.roofline.measured_rank import CannotMeasure

    try:
        for finding in _findings(request):
            _print_finding(finding)
    except CannotMeasure as error:
        _print_finding(MeasureRefused(str(error)))
        return 1
    return 0


def _findings(request: MeasureRequest) -> Iterator[Finding]:
    # torch is imported behind the first check, so that a wrong question is answered at once.
    match request:
        case StepsRequest():
            from services.worker.measure.roofline.steps import measure_steps

            return measure_steps(request)
        case KernelsRequest():
            from services.worker.measure.roofline.kernels import measure_kernels

            return measure_kernels(request)
        case _:
            assert_never(request)


def _print_finding(finding: Finding) -> None:
    print(msgspec.json.encode(finding).decode(), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
