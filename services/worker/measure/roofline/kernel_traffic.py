"""What each kernel must move and multiply at the least: the other side of a roofline. Integers, no torch.

Bytes count what has to come from or go to the device's memory once; FLOPs count multiplication and addition each.
"""

from __future__ import annotations

from collections.abc import Iterable

from shared.blocks import DEFAULT_BLOCK_SIZE


def visible(context: int, window: int | None) -> int:
    """Tokens of a context that its newest one sees."""
    return context if window is None else min(context, window)


def decode_bytes(
    contexts: Iterable[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    cache_itemsize: int,
    window: int | None = None,
) -> int:
    """Keys and values of all contexts, queries and results; without the partials of a context cut in shares."""
    contexts = list(contexts)
    tokens = sum(visible(context, window) for context in contexts)
    return 2 * tokens * kv_heads * head_dim * cache_itemsize + 2 * len(contexts) * heads * head_dim * itemsize


def decode_flops(contexts: Iterable[int], *, heads: int, head_dim: int, window: int | None = None) -> int:
    """Two products, of queries with keys and of chances with values."""
    return 4 * heads * head_dim * sum(visible(context, window) for context in contexts)


def prefill_flops(prefills: Iterable[tuple[int, int]], *, heads: int, head_dim: int, window: int | None = None) -> int:
    """Operations of sequences of (rows, context), where the rows are the last of the context; what the causal mask
    hides is not counted."""
    return 4 * heads * head_dim * sum(_seen(rows, context, window) for rows, context in prefills)


def prefill_bytes(
    prefills: Iterable[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    cache_itemsize: int,
    window: int | None = None,
) -> int:
    """Queries, results, and once the keys and values that some row sees."""
    moved = 0
    for rows, context in prefills:
        tokens = context if window is None else min(context, window + rows - 1)
        moved += 2 * rows * heads * head_dim * itemsize + 2 * tokens * kv_heads * head_dim * cache_itemsize
    return moved


def mixture_bytes(rows: int, met: float, *, experts: int, hidden: int, size: int, itemsize: int) -> float:
    """The weights of the `met` of `experts` experts that rows go through, rows in and out, and logits."""
    return (3 * met * size * hidden + rows * (2 * hidden + experts)) * itemsize


def mixture_flops(rows: int, *, chosen: int, hidden: int, size: int) -> int:
    """Gates, ups and outputs of the `chosen` experts of each row; routing is not counted."""
    return 6 * rows * chosen * size * hidden


def verification_bytes(rows: int, sequences: int) -> int:
    """Each row's token in, as drawn, and out; its draft; three numbers of each sequence. Of steps that draw behind all
    rows."""
    return 16 * rows + 12 * sequences


def kv_block_bytes(blocks: int, *, layers: int, kv_heads: int, head_dim: int, cache_itemsize: int) -> int:
    """Keys and values of whole blocks, out of the caches and into one run of memory, or back."""
    return 2 * blocks * layers * 2 * kv_heads * DEFAULT_BLOCK_SIZE * head_dim * cache_itemsize


def mask_bytes(rows: int, vocab: int, itemsize: int) -> int:
    """Bits in; logits written where they are forbidden, all of them at the most, and not read."""
    return rows * (4 * -(-vocab // 32) + vocab * itemsize)


def _seen(rows: int, context: int, window: int | None) -> int:
    """Pairs of a row and a token that it sees."""
    most = context if window is None else min(context, window)
    before = context - rows
    # Rows at positions below `most` - 1 see one token more than the row before, the others `most`.
    growing = max(0, min(rows, most - before))
    return growing * before + growing * (growing + 1) // 2 + (rows - growing) * most
