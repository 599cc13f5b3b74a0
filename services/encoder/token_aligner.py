"""When each token of a transcription was said: out of what a Whisper decoder's heads look at (cross-attention).

The finished text is read once more, all of it at a time, as OpenAI's own code does (`whisper/timing.py`); weights of
heads that follow what is spoken are smoothed, and tokens laid along rows of the sound by dynamic time warping, as
`transformers` does (`_extract_token_timestamps`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from services.encoder.tower import DTYPES, TowerUnusable, load_part
from shared.messages.encoder import WrittenTokens
from shared.messages.generation import EmbeddingDtype
from shared.packing import unpack

_DIAGONAL, _TOKEN, _ROW = 0, 1, 2
"""Where a step of a path comes from: the token and the row before, the token before, the row before."""


class _RawAlignment(Struct):
    alignment_heads: tuple[tuple[int, int], ...] | None = None


class TokenAligner:
    """Owns the weights of a model's decoder. One thread at a time."""

    def __init__(self, folder: Path, dtype: EmbeddingDtype) -> None:
        """Loads it on the processors. Raises TowerUnusable."""
        from transformers import AutoConfig, WhisperModel

        config = AutoConfig.from_pretrained(folder)
        self._heads = alignment_heads(folder, config.decoder_layers, config.decoder_attention_heads)
        self._filter_width: int = config.median_filter_width
        self._vocabulary, self._positions = int(config.vocab_size), int(config.max_target_positions)
        config.encoder_layers = 0
        whole = load_part(WhisperModel, folder, config, DTYPES[dtype], lambda name: name.startswith("decoder."))
        whole.set_attn_implementation("eager")  # which shows its weights
        self._decoder = whole.get_decoder().eval()

    @torch.inference_mode()
    def ends(self, rows: Tensor, written: WrittenTokens, heard: int) -> list[int]:
        """The row at which each token of the answer ends. `rows`: [rows, size], of which `heard` are of the sound.
        Raises TowerUnusable."""
        ids = unpack(written.tokens)
        if not 0 < written.begin <= len(ids) <= self._positions or max(ids) >= self._vocabulary:
            raise TowerUnusable(
                f"{len(ids)} tokens are not allowed; 1 to {self._positions}, below {self._vocabulary}, are"
            )
        if written.begin == len(ids):
            return []
        looked: Any = self._decoder(
            input_ids=torch.tensor([ids]),
            encoder_hidden_states=rows.unsqueeze(0),
            output_attentions=True,
            use_cache=False,
        ).cross_attentions
        weights = torch.stack([looked[layer][0, head] for layer, head in self._heads])[:, written.begin :, :heard]
        return token_ends(weights, self._filter_width)


def alignment_heads(folder: Path, layers: int, heads: int) -> Sequence[tuple[int, int]]:
    """(layer, head) of those that follow what is spoken, as `generation_config.json` says; where it does not, all of
    the upper half of layers, as OpenAI's code has it. Raises TowerUnusable for others than the model has."""
    try:
        raw = msgspec.json.decode((folder / "generation_config.json").read_bytes(), type=_RawAlignment)
    except (OSError, msgspec.MsgspecError):
        raw = _RawAlignment()
    found = raw.alignment_heads or [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
    for layer, head in found:
        if not (0 <= layer < layers and 0 <= head < heads):
            raise TowerUnusable(f"alignment_heads: [{layer}, {head}] is not allowed; the model has {layers} × {heads}")
    return found


def token_ends(weights: Tensor, filter_width: int) -> list[int]:
    """The row at which each token ends. `weights`: [heads, tokens, rows]."""
    weights = weights.float()
    deviation = torch.std(weights, dim=-2, keepdim=True, unbiased=False)
    scores = (weights - weights.mean(dim=-2, keepdim=True)) / deviation
    scores = smoothed(scores.nan_to_num(), filter_width).mean(dim=0)  # one token deviates from nothing
    return warped(-scores.double().numpy())


def smoothed(scores: Tensor, width: int) -> Tensor:
    """Each number replaced by the median of `width` along the last dimension, mirrored at its ends."""
    half = width // 2
    if scores.shape[-1] <= half:
        return scores
    mirrored = torch.nn.functional.pad(scores, (half, half), mode="reflect")
    return mirrored.unfold(-1, width, 1).sort()[0][..., half]


def warped(costs: NDArray[np.float64]) -> list[int]:
    """The first row of each token on the cheapest path through `costs` [tokens, rows] that never goes back (dynamic
    time warping). Diagonal by diagonal, as numbers on one depend on none beside them. Sums are float32, and ties go
    where they go in `transformers`."""
    tokens, rows = costs.shape
    total = np.full((tokens + 1, rows + 1), np.inf, np.float32)
    total[0, 0] = 0
    came = np.full((tokens + 1, rows + 1), _ROW, np.int8)
    came[1:, 0] = _TOKEN
    for diagonal in range(2, tokens + rows + 1):
        i = np.arange(max(1, diagonal - rows), min(tokens, diagonal - 1) + 1)
        j = diagonal - i
        both, token, row = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where(
            (both < token) & (both < row), _DIAGONAL, np.where((token < both) & (token < row), _TOKEN, _ROW)
        )
        came[i, j] = step
        total[i, j] = costs[i - 1, j - 1] + np.choose(step, (both, token, row))
    first, i, j = [0] * tokens, tokens, rows
    while i > 0:
        first[i - 1] = max(j - 1, 0)
        if (step_back := came[i, j]) != _ROW:
            i -= 1
        if step_back != _TOKEN:
            j -= 1
    return first
