"""A model's encoder of prompts, by `transformers`: token ids to rows that the decoder's tokens attend to."""

from __future__ import annotations

from pathlib import Path

import torch
from msgspec import Struct

from services.encoder.image_decoder import ImageRefused
from services.encoder.tower import DTYPES, DtypeChoice, TowerUnusable, load_part, own_dtype, packed_rows, refusing
from shared.messages.encoder import EncodeInput
from shared.messages.generation import EmbeddingDtype, PromptEmbeds
from shared.messages.model_card import EncoderDecoderModel
from shared.models.encoder_models import read_encoder_decoder
from shared.packing import TOKEN_BYTES, unpack

_NEEDED = ("encoder.", "shared.")
"""Of a checkpoint's tensors."""


class PromptTokens(Struct, frozen=True):
    """A prompt, packed as uint32."""

    tokens: bytes

    @property
    def measures(self) -> dict[str, int]:
        """For logs."""
        return {"prompt": len(self.tokens) // TOKEN_BYTES}


class TokenReader:
    """Takes what tokenizers have made of prompts."""

    def __init__(self, model: EncoderDecoderModel) -> None:
        self._most = model.rows

    async def decode(self, question: EncodeInput) -> PromptTokens:
        """The tokens. Raises ImageRefused where these are none, or more than the model takes."""
        count, rest = divmod(len(question.content), TOKEN_BYTES)
        if rest or not 0 < count <= self._most:
            raise ImageRefused(f"{count} tokens are not allowed; 1 to {self._most} are")
        return PromptTokens(question.content)

    async def close(self) -> None:
        """Nothing is open."""


class PromptTower:
    """Owns the weights of a model's encoder. One thread at a time.

    A prompt is encoded alone, so its rows depend on no other.
    """

    def __init__(self, folder: Path, dtype: DtypeChoice = "auto") -> None:
        """Loads it on the processors. Raises TowerUnusable."""
        from transformers import AutoConfig, AutoModel

        model = read_encoder_decoder(folder)
        if model is None:
            raise TowerUnusable(f"{folder}: the model has no encoder of prompts")
        with refusing(folder):
            config = AutoConfig.from_pretrained(folder)
        self.dtype: EmbeddingDtype = own_dtype(config) if dtype == "auto" else dtype
        self.size, self._vocabulary = model.row_size, int(config.vocab_size)
        setattr(config, "decoder_layers" if hasattr(config, "decoder_layers") else "num_decoder_layers", 0)
        whole = load_part(AutoModel, folder, config, DTYPES[self.dtype], lambda name: name.startswith(_NEEDED))
        self._encoder = whole.get_encoder().eval()

    @torch.inference_mode()
    def encode(self, prompt: PromptTokens) -> PromptEmbeds:
        """A row for each token of a prompt. Raises TowerUnusable where they are no numbers, or a token is not of the
        vocabulary."""
        ids = unpack(prompt.tokens)
        if max(ids) >= self._vocabulary:
            raise TowerUnusable(f"token {max(ids)} is not in the vocabulary of {self._vocabulary}")
        rows = self._encoder(torch.tensor([ids])).last_hidden_state[0].to(DTYPES[self.dtype])
        packed = packed_rows(rows, self.dtype, "prompt")
        return PromptEmbeds(dtype=self.dtype, size=self.size, rows=packed, runs=((0, len(rows)),), encoded=True)
