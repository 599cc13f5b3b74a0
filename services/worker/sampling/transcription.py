"""What a model that writes down what is said may draw: `transformers`' own rules for Whisper, those of its paper.

Requests ask by `vllm_xargs` (the gateway's endpoints for audio do): `{"transcription": "text"}`, or "timestamps" where
times are drawn, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from services.worker.sampling.plugins.interface import BatchUpdate, LogitsProcessor, ProcessorConfig, ProcessorParams
from shared.models.audio_models import TRANSCRIPTION_ARG, read_audio_model

ALLOWED = ("text", "timestamps")


class TranscriptionRules(LogitsProcessor):
    """Owns which requests ask, and what each has drawn. The rules are functions of that."""

    extra_args = (TRANSCRIPTION_ARG,)

    @classmethod
    def validate_params(cls, params: ProcessorParams) -> None:
        """Raises ValueError."""
        if (value := params.extra_args.get(TRANSCRIPTION_ARG)) not in ALLOWED:
            raise ValueError(f"{TRANSCRIPTION_ARG} {value!r} is not allowed; {' and '.join(ALLOWED)} are")

    def __init__(self, config: ProcessorConfig) -> None:
        audio = read_audio_model(config.model)
        assert audio is not None, "only models that hear have it"
        self._settings = SimpleNamespace(  # what the library's rules read of a generation's settings
            no_timestamps_token_id=audio.no_timestamps,
            eos_token_id=audio.end,
            bos_token_id=audio.end,
            max_initial_timestamp_index=audio.max_first_timestamp,
        )
        self._audio, self._device = audio, config.device
        self._requests: dict[int, tuple[bool, int, Sequence[int], Sequence[int]]] = {}
        """By index: whether it has times, and how long its prompt is; its prompt and output."""

    def is_argmax_invariant(self) -> bool:
        """It is not."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See `LogitsProcessor`."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            del self._requests[index]
        for index, params, prompt, output in batch_update.added:
            times = params.extra_args[TRANSCRIPTION_ARG] == "timestamps"
            self._requests[index] = (times, len(prompt), prompt, output)
        for source, target, _ in batch_update.moved:
            self._requests[target] = self._requests.pop(source)

    def apply(self, logits: Tensor) -> Tensor:
        """See `LogitsProcessor`."""
        for index, (times, begin, prompt, output) in self._requests.items():
            rules = self._rules(times, begin, self._device)
            ids = torch.tensor([[*prompt, *output]], dtype=torch.long, device=logits.device)
            row = logits[index : index + 1]
            for rule in rules:
                row = rule(ids, row)
            logits[index : index + 1] = row
        return logits

    def _rules(self, times: bool, begin: int, device: torch.device) -> list[Any]:
        """The library's, in its order. They are made anew, as some remember where an answer begins."""
        from transformers.generation import logits_process as rules

        own: Any = rules
        found: list[Any] = []
        if self._audio.suppressed_first:
            first = list(self._audio.suppressed_first)
            found.append(own.SuppressTokensAtBeginLogitsProcessor(first, begin_index=begin, device=device))
        if self._audio.suppressed:
            found.append(own.SuppressTokensLogitsProcessor(list(self._audio.suppressed), device=device))
        if times:
            found.append(own.WhisperTimeStampLogitsProcessor(self._settings, begin_index=begin))
        return found
