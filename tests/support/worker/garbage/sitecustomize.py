"""On the PYTHONPATH of a stack under test: while the file $GARBAGE_WHEN_THERE is there, one rank computes garbage.

The file names the process to do so by its pid, and what its logits become: "PID zero" has token 0 win for ever, "PID
nan" makes them NaN, "PID prompts" only those of clients' prompts, not a canary's. Python imports this at its start,
long before the model's classes exist; a finder wraps them when they are imported.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.imported_modules import change_when_imported

DECODER, DECODES = "services.worker.models.native_decoder", "services.worker.graphs.host_decodes"


def wanted() -> str | None:
    try:
        pid, what = Path(os.environ["GARBAGE_WHEN_THERE"]).read_text().split()
    except (FileNotFoundError, ValueError):
        return None
    return what if int(pid) == os.getpid() else None


def rows_of_prompts(ids: Any, meta: Any, vocabulary: int) -> list[int]:
    """Rows of the logits that end prompts of clients: a step may have a canary's rows, or its next token, beside."""
    from services.scheduler.core.health.canary import PROMPT_STRIDE

    tokens, starts = ids.tolist(), meta.query_starts.tolist()
    canary = [PROMPT_STRIDE % vocabulary, 2 * PROMPT_STRIDE % vocabulary]
    spans = list(pairwise(starts))[meta.num_decodes :]
    ends = {end - 1 for begin, end in spans if tokens[begin : begin + 2] != canary}
    return [number for number, row in enumerate(meta.logits_rows.tolist()) if row in ends]


def spoilt(forward: Any) -> Any:
    def spoiling(decoder: Any, ids: Any, meta: Any, *arguments: Any, **keywords: Any) -> Any:
        logits = forward(decoder, ids, meta, *arguments, **keywords)
        what = wanted()
        if what is None or logits is None:
            return logits
        if what == "nan":
            return logits * float("nan")
        logits = logits.clone()
        if what == "prompts":
            logits[rows_of_prompts(ids, meta, logits.shape[1])] = float("nan")
        else:
            logits[:, 0] = 1e4
        return logits

    return spoiling


def spoil(module: Any) -> None:
    module.NativeDecoder.forward = spoilt(module.NativeDecoder.forward)


def draw_from_logits(module: Any) -> None:
    """No step ends in the library, where its logits could not be changed."""
    module.HostDecodes.of = lambda *_: None


if "GARBAGE_WHEN_THERE" in os.environ:
    change_when_imported({DECODER: spoil, DECODES: draw_from_logits})
