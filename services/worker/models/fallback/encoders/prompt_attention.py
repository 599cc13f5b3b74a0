"""Attention of rows that lie behind each other to those of their own prompt: all of it, before them and behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "baton-encoder"
"""Of the attention, to the library."""

_current = threading.local()
"""`lengths`: rows of each prompt in this thread's pass."""


@contextmanager
def prompts_of(lengths: list[int]) -> Iterator[None]:
    """While it is entered, the rows of this thread's passes are of prompts of these lengths."""
    _current.lengths = lengths
    try:
        yield
    finally:
        del _current.lengths


def prompt_lengths() -> list[int]:
    """Of the pass that runs."""
    lengths: list[int] = _current.lengths
    return lengths


def attend_prompts(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, bias: Callable[[Tensor, Tensor], Tensor | None]
) -> Tensor:
    """query [1, H, n, D], key and value [1, K, n, D] → [1, n, H, D]. `bias` makes of the query and key of one prompt
    what is added to its products, or which of them count; it broadcasts to [1, H, rows, rows]."""
    mixed = []
    for q, k, v in zip(*(torch.split(each, prompt_lengths(), dim=2) for each in (query, key, value)), strict=True):
        shared = q.shape[1] != k.shape[1]
        mixed.append(F.scaled_dot_product_attention(q, k, v, attn_mask=bias(q, k), scale=scale, enable_gqa=shared))
    return torch.cat(mixed, dim=2).transpose(1, 2).contiguous()


def register() -> None:
    """Makes the attention known to the library, with no mask: what a row sees is decided here."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The library's signature: query [1, H, n, D], key and value [1, K, n, D] → ([1, n, H, D], no weights). A window
    is one more than the distance that tokens see on either side."""
    return attend_prompts(query, key, value, scaling, partial(_near, sliding_window)), None


def _near(window: int | None, query: Tensor, key: Tensor) -> Tensor | None:
    """bool [n, n]: which tokens are nearer than `window`; None where all are."""
    rows = query.shape[2]
    if window is None or window >= rows:
        return None
    at = torch.arange(rows, device=query.device)
    return (at[:, None] - at).abs() < window


def _no_mask(*_: Any, **__: Any) -> None:
    return None
