"""Whether a model gives the same logits in one pass and in several, alone and beside others.

What `transformers` computes is looked at from outside: a layer that keeps more of a sequence than keys and values, or
looks at positions that it was not given, would be served wrongly without a word. Such a layer differs here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from services.worker.models.config import ModelError
from services.worker.models.loaded_model import CausalLm
from services.worker.models.weights import KvCaches
from services.worker.ops.interface import BatchMeta

_ROWS, _CUT = 8, 5
_TOLERANCE = 0.1
"""Of the logits' spread. What is forgotten changes them by more; rounding to eight bits by a tenth of that."""


@torch.inference_mode()
def check_positions(model: CausalLm, owner: nn.Module, vocab_size: int, device: torch.device) -> None:
    """Raises ModelError where a table of `owner`, which `model` computes by, is read at positions that were not given:
    logits may differ by less than rounding to few bits then, and are wrong all the same. One token is repeated, so that
    rows of a table that differ are those of positions. Every rank of a stage must come here."""
    caches = model.allocate_kv(1)
    ids = torch.full((_CUT,), vocab_size // 2, dtype=torch.int32, device=device)
    read: list[dict[str, Tensor]] = []

    def noting(name: str) -> Any:
        def note(_module: nn.Module, _inputs: object, rows: object) -> None:
            if isinstance(rows, Tensor):
                read[-1][name] = rows.reshape(-1, rows.shape[-1]).clone()

        return note

    tables = [(name, each) for name, each in owner.named_modules() if isinstance(each, nn.Embedding)]
    hooks = [each.register_forward_hook(noting(name)) for name, each in tables]
    try:
        for before in (0, _CUT):
            read.append({})
            _logits(model, caches, [(0, before, ids)])
    finally:
        for hook in hooks:
            hook.remove()
    first, second = read
    for name, rows in first.items():
        if bool((rows != rows[:1]).any()) and name in second and torch.equal(rows, second[name]):
            raise ModelError(f"{type(owner).__name__} finds positions by itself, in {name}, which is not supported")


@torch.inference_mode()
def check_cached_passes(model: CausalLm, name: str, vocab_size: int, device: torch.device) -> None:
    """Raises ModelError where the results of the model `name` differ. Every rank of a stage must come here: the first
    one sees them."""
    caches = model.allocate_kv(2)
    ids = torch.linspace(vocab_size // 7, vocab_size - 1, _ROWS, device=device).to(torch.int32)
    other = ids.flip(0)
    whole = _logits(model, caches, [(0, 0, ids)])
    _logits(model, caches, [(0, 0, ids[:_CUT])])
    rest = _logits(model, caches, [(0, _CUT, ids[_CUT:])])
    _logits(model, caches, [(0, 0, ids[:-1])])
    beside = _logits(model, caches, [(0, _ROWS - 1, ids[-1:]), (1, 0, other)])
    if whole is None or rest is None or beside is None:
        return
    spread = float(whole.std()) or 1.0
    differences = {
        "in several steps": float((rest - whole[_CUT:]).abs().max()),
        "beside another sequence": float((beside[0] - whole[-1]).abs().max()),
    }
    for words, difference in differences.items():
        if not difference <= _TOLERANCE * spread:
            raise ModelError(
                f"{name} computes something else {words}: it keeps more of a sequence than keys and values, or "
                f"finds positions by itself (logits differ by {difference:.3g}, their spread is {spread:.3g})"
            )


def _logits(model: CausalLm, caches: KvCaches, parts: list[tuple[int, int, Tensor]]) -> Tensor | None:
    """Of all rows; None on ranks behind the first.

    `parts`: (its block, tokens before, ids) of each sequence; those of one row come first.
    """
    device = parts[0][2].device
    size = model.ops.block_size
    counts = [len(ids) for _, _, ids in parts]
    ends = [before + len(ids) for _, before, ids in parts]
    decodes = sum(count == 1 for count in counts)

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = [position for (_, before, _), end in zip(parts, ends, strict=True) for position in range(before, end)]
    blocks = [block for (block, _, ids) in parts for _ in range(len(ids))]
    meta = BatchMeta(
        query_starts=numbers([0, *(sum(counts[: number + 1]) for number in range(len(counts)))]),
        context_lens=numbers(ends),
        block_tables=numbers([block for block, _, _ in parts]).unsqueeze(1),
        slots=numbers([block * size + position for block, position in zip(blocks, positions, strict=True)]),
        positions=numbers(positions),
        logits_rows=numbers(list(range(len(positions)))),
        num_decodes=decodes,
        prefills=tuple(zip(counts[decodes:], ends[decodes:], strict=True)),
        max_query=max(counts),
        max_context=max(ends),
        block_size=size,
    )
    logits = model.forward(torch.cat([ids for _, _, ids in parts]), meta, caches)
    return None if logits is None else logits.clone()
