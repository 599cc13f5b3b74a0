"""A model's encoder of sounds and projector, by `transformers`: samples to rows that stand in place of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.encoder.audio_tower import Samples, read_extractor
from services.encoder.tower import DTYPES, DtypeChoice, TowerUnusable, load_tower, own_dtype, packed_rows
from shared.messages.generation import EmbeddingDtype, PromptEmbeds
from shared.models.audio_models import SAMPLE_BYTES
from shared.models.sound_models import read_sound_model


class SoundTower:
    """Owns the weights of Qwen2-Audio's encoder and projector, and what makes mel spectrograms. One thread at a time.

    A sound is encoded alone, so its rows depend on no other.
    """

    def __init__(self, folder: Path, dtype: DtypeChoice = "auto") -> None:
        """Loads it on the processors. Raises TowerUnusable."""
        sounds = read_sound_model(folder)
        if sounds is None:
            raise TowerUnusable(f"{folder}: the model takes no sounds")
        config, self._extractor = read_extractor(folder)
        self.dtype: EmbeddingDtype = own_dtype(config) if dtype == "auto" else dtype
        self.size, self._rate = sounds.row_size, sounds.sample_rate
        self._model = load_tower(folder, config, DTYPES[self.dtype])
        self.encode(Samples(bytes(SAMPLE_BYTES * self._rate // 10)))

    @torch.inference_mode()
    def encode(self, sound: Samples) -> PromptEmbeds:
        """The rows of a sound, one for each 40 ms. Raises TowerUnusable where they are no numbers."""
        rows = self._rows(np.frombuffer(sound.samples, np.dtype("<f4")))
        packed = packed_rows(rows, self.dtype, "sound")
        return PromptEmbeds(dtype=self.dtype, size=self.size, rows=packed, runs=((0, len(rows)),))

    def _rows(self, samples: np.ndarray[Any, Any]) -> Tensor:
        """As `Qwen2AudioModel.forward` makes them: a window is padded, and what pads it is seen by nothing."""
        from transformers.masking_utils import create_bidirectional_mask

        prepared = self._extractor(
            samples,
            sampling_rate=self._rate,
            return_attention_mask=True,
            padding="max_length",
            return_tensors="pt",
        )
        features, tower = prepared.input_features.to(DTYPES[self.dtype]), self._model.audio_tower
        lengths, counts = tower._get_feat_extract_output_lengths(prepared.attention_mask.sum(-1))
        most = (features.shape[-1] - 2) // 2 + 1
        mask = create_bidirectional_mask(
            config=tower.config,
            inputs_embeds=torch.zeros(1, most, 1, dtype=features.dtype),
            attention_mask=(torch.arange(most)[None] < lengths[:, None]).long(),
        )
        hidden = tower(features, attention_mask=mask).last_hidden_state
        rows: Tensor = self._model.multi_modal_projector(hidden)[0, : int(counts[0])]
        return rows
