"""Prompts of embeddings: as messages carry them, and what `transformers` makes of them."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from shared.messages.generation import PromptEmbeds


def prompt_embeds(rows: Tensor) -> PromptEmbeds:
    """rows [n, hidden] as a message has them."""
    dtype: Any = str(rows.dtype).removeprefix("torch.")
    return PromptEmbeds(
        dtype=dtype, size=rows.shape[1], rows=rows.detach().contiguous().view(torch.uint8).numpy().tobytes()
    )


def prompt_embeds_field(rows: Tensor) -> str:
    """rows [n, hidden] as a client sends them."""
    torch.save(rows, file := io.BytesIO())
    return base64.b64encode(file.getvalue()).decode()


@torch.inference_mode()
def own_embeddings(reference: Any, tokens: list[int]) -> Tensor:
    """[n, hidden] what the model has for these tokens."""
    rows: Tensor = reference.get_input_embeddings()(torch.tensor(tokens))
    return rows.clone()


def random_rows(reference: Any, count: int, seed: int = 0) -> Tensor:
    """[count, hidden] that are no token's, of the model's spread."""
    table = reference.get_input_embeddings().weight
    drawn = torch.randn(count, table.shape[1], generator=torch.Generator().manual_seed(seed))
    return drawn * own_embeddings(reference, list(range(8))).std()


@torch.inference_mode()
def greedy_of_rows(reference: Any, rows: Tensor, count: int) -> list[int]:
    """`count` tokens as the library's `generate(inputs_embeds=...)` draws them; rows [n, hidden]."""
    output = reference.generate(
        inputs_embeds=rows.to(reference.dtype).unsqueeze(0),
        attention_mask=torch.ones(1, len(rows), dtype=torch.long),
        generation_config=GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0),
    )
    tokens: list[int] = output[0].tolist()
    return tokens


@torch.inference_mode()
def logits_of_rows(reference: Any, rows: Tensor) -> Tensor:
    """[n, vocabulary] of the library."""
    logits: Tensor = reference(inputs_embeds=rows.to(reference.dtype).unsqueeze(0)).logits[0]
    return logits
