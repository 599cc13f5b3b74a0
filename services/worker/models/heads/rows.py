"""Where a rank's queries, keys and values lie among the outputs of the modules that make them. Knows no files."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from services.worker.models.config import ModelConfig
from services.worker.models.hf_layers.tensor_names import tensor_names
from services.worker.models.rope import partly_rotated
from services.worker.models.sharding import LayerShard
from services.worker.models.weights import Rows


class HeadRows(NamedTuple):
    """Of queries, of keys, or of values."""

    module: str
    """What makes them, within a layer's attention."""
    outputs: int
    """Of the whole module."""
    rows: Rows
    """Those of them that the rank has: from and to, or each in its order."""

    @property
    def span(self) -> tuple[int, int]:
        """From the first of them to behind the last."""
        return (int(self.rows.min()), int(self.rows.max()) + 1) if isinstance(self.rows, Tensor) else self.rows


def head_rows(
    config: ModelConfig, share: LayerShard, kv_heads: int | None = None
) -> tuple[HeadRows, HeadRows, HeadRows]:
    """Queries, keys and values of a rank; of a layer with fewer `kv_heads` than are cached, each as often as it is.
    Where less than whole heads, or neighbours, are rotated, elements of queries
    and keys are in the order in which whole heads are: scores are sums over elements, whatever their order."""
    names, dim, groups = tensor_names(config.architecture), config.head_dim, config.num_kv_heads
    sizes = (config.num_heads * dim, groups * dim, groups * dim)
    order = partly_rotated(dim, config.rotated_dim, pairs=config.rotary_pairs) if config.reorders_heads else None
    found = []
    for part, (module, own) in enumerate(zip(names.qkv, (share.heads, share.kv_heads, share.kv_heads), strict=True)):
        beside = [number for number, name in enumerate(names.qkv) if name == module]
        before = sum(sizes[number] for number in beside if number < part)
        outputs = sum(sizes[number] for number in beside)
        rows: Rows = (own[0] * dim, own[1] * dim)
        if order is not None and part < 2:
            rows = torch.arange(*rows).view(-1, dim)[:, order].flatten()
        if part and kv_heads is not None:
            rows, outputs = _repeated(rows, dim, groups // kv_heads), kv_heads * dim
        if len(beside) > 1:
            rows = _within(rows, sizes[part], before, outputs, groups if names.qkv_by_group else 1)
        found.append(HeadRows(module, outputs, rows))
    queries, keys, values = found
    return queries, keys, values


def _repeated(rows: Rows, dim: int, times: int) -> Tensor:
    """`rows` of heads each of which is there so many times, one behind the other, as rows of these heads once."""
    numbers = rows if isinstance(rows, Tensor) else torch.arange(*rows)
    return numbers // (dim * times) * dim + numbers % dim


def _within(rows: Rows, size: int, before: int, outputs: int, groups: int) -> Rows:
    """`rows` of `size` as rows of a module that has so many outputs, where they lie behind `before` others, those of
    each group apart."""
    if groups == 1 and not isinstance(rows, Tensor):
        return before + rows[0], before + rows[1]
    numbers = rows if isinstance(rows, Tensor) else torch.arange(*rows)
    each = size // groups
    return numbers // each * (outputs // groups) + before // groups + numbers % each


def alibi_slopes(heads: int) -> Tensor:
    """float32 [heads] of ALiBi (arXiv:2108.12409, section 3), also where these are no power of two."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (number + 1) / power) for number in range(power)]
    between = [2 ** (-8 * (number + 1) / (2 * power)) for number in range(0, 2 * (heads - power), 2)]
    return torch.tensor(slopes + between, dtype=torch.float32)
