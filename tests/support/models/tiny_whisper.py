"""A tiny random Whisper with a tokenizer of its own kind, sounds to hear, and what `transformers` makes of both."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTimeStampLogitsProcessor,
)
from transformers.generation.utils import GenerationMixin

from shared.messages.generation import PromptEmbeds
from tests.support.models.embedded_prompts import prompt_embeds
from tests.support.models.sounds import SAMPLE_RATE
from tests.support.models.tiny_tokenizers import TEXT

WINDOW_S = 2
"""Seconds that the model hears at a time; OpenAI's hear 30."""
ROWS = WINDOW_S * 50
POSITIONS = 80
LANGUAGES = ("en", "de", "fr")
_SPECIAL = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)


class WhisperModel(NamedTuple):
    """A model that was written to a folder, and the library's own of the same weights."""

    path: Path
    reference: Any
    extractor: Any
    tokenizer: Tokenizer

    def id_of(self, token: str) -> int:
        """Of a special token."""
        found: int | None = self.tokenizer.token_to_id(token)
        assert found is not None, token
        return found

    def prompt(self, language: str = "en", task: str = "transcribe", *, times: bool = False) -> list[int]:
        """The tokens that an answer goes on behind."""
        words = ["<|startoftranscript|>", f"<|{language}|>", f"<|{task}|>", *([] if times else ["<|notimestamps|>"])]
        return [self.id_of(word) for word in words]

    def features(self, sound: NDArray[np.float32]) -> torch.Tensor:
        """[1, mels, frames]"""
        made = self.extractor(sound, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        found: torch.Tensor = made.input_features
        return found

    @torch.inference_mode()
    def rows(self, sound: NDArray[np.float32]) -> PromptEmbeds:
        """What its encoder makes of a sound, as a message has it."""
        rows = self.reference.get_encoder()(self.features(sound)).last_hidden_state[0]
        made = prompt_embeds(rows)
        return PromptEmbeds(dtype=made.dtype, size=made.size, rows=made.rows, encoded=True)

    @torch.inference_mode()
    def generated(
        self,
        sound: NDArray[np.float32],
        count: int,
        language: str = "en",
        task: str = "transcribe",
        *,
        times: bool = False,
        before: str | None = None,
    ) -> list[int]:
        """Up to `count` tokens as the library's `generate` draws them, which must be so few that no time is among them
        from which it would begin again. `before`: what was said before."""
        given = {} if before is None else {"prompt_ids": torch.tensor(self.said(before))}
        begin = len(self.prompt(language, task, times=times)) + len(given.get("prompt_ids", ()))
        output = self.reference.generate(
            self.features(sound),
            language=language,
            task=task,
            return_timestamps=times,
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            return_segments=False,
            **given,
        )
        tokens: list[int] = (output["sequences"] if isinstance(output, dict) else output)[0].tolist()
        whole = tokens[0] in (self.id_of("<|startoftranscript|>"), self.id_of("<|startofprev|>"))
        return tokens[begin:] if whole else tokens

    @torch.inference_mode()
    def greedy(
        self,
        sound: NDArray[np.float32],
        language: str = "en",
        task: str = "transcribe",
        *,
        times: bool = False,
        before: str | None = None,
    ) -> list[int]:
        """All tokens that the library draws of one window: its search, by its own rules."""
        prompt = [*([] if before is None else self.said(before)), *self.prompt(language, task, times=times)]
        settings, begin = self.reference.generation_config, len(prompt)
        rules: list[Any] = [
            SuppressTokensAtBeginLogitsProcessor(settings.begin_suppress_tokens, begin),
            SuppressTokensLogitsProcessor(settings.suppress_tokens),
        ]
        if times:
            rules.append(WhisperTimeStampLogitsProcessor(settings, begin_index=begin))
        search: Any = GenerationMixin.generate
        output = search(
            self.reference,
            input_features=self.features(sound),
            decoder_input_ids=torch.tensor([prompt]),
            generation_config=GenerationConfig(
                max_new_tokens=POSITIONS - begin,
                do_sample=False,
                eos_token_id=settings.eos_token_id,
                pad_token_id=settings.pad_token_id,
                decoder_start_token_id=settings.decoder_start_token_id,
            ),
            logits_processor=LogitsProcessorList(rules),
        )
        tokens: list[int] = output[0, begin:].tolist()
        return tokens

    def said(self, text: str) -> list[int]:
        """The tokens that stand before the beginning."""
        return [self.id_of("<|startofprev|>"), *self.tokenizer.encode(f" {text}", add_special_tokens=False).ids]

    @torch.inference_mode()
    def detected(self, sound: NDArray[np.float32]) -> str:
        """The code of the language that the library finds in a sound."""
        found: str = self.tokenizer.id_to_token(int(self.reference.detect_language(self.features(sound)))).strip("<|>")
        return found

    def segments(self, tokens: list[int], start: float, seconds: float) -> list[tuple[float, float, str]]:
        """(start, end, text) of what stands between times, in a window that begins at `start`."""
        found, begun, held = [], 0.0, list[int]()
        first = self.id_of("<|0.00|>")
        for token in [*tokens, first + ROWS]:
            if token >= first:
                text = self.tokenizer.decode(held)
                if text.strip():
                    found.append((start + min(begun, seconds), start + min((token - first) / 50, seconds), text))
                begun, held = (token - first) / 50, []
            elif token < self.id_of("<|endoftext|>"):
                held.append(token)
        return found

    def text(self, tokens: list[int]) -> str:
        """Without special tokens, and without times, which a random model draws unasked: cut out of the text, as the
        library's tokenizer does."""
        return re.sub(r"<\|\d+\.\d\d\|>", "", self.tokenizer.decode(tokens, skip_special_tokens=True))


def make_whisper(folder: Path, seed: int = 0, *, dtype: torch.dtype = torch.float32) -> WhisperModel:
    """Writes a Whisper that hears two seconds at a time to `folder`."""
    tokenizer = _tokenizer()
    ids = {token: tokenizer.token_to_id(token) for token in _SPECIAL}
    end = ids["<|endoftext|>"]
    config = WhisperConfig(
        vocab_size=tokenizer.get_vocab_size(),
        num_mel_bins=80,
        d_model=64,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=ROWS,
        max_target_positions=POSITIONS,
        init_std=0.15,
        pad_token_id=end,
        bos_token_id=end,
        eos_token_id=end,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    torch.manual_seed(seed)
    reference = WhisperForConditionalGeneration(config).eval()
    for name, value in {
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "suppress_tokens": [3, 7, 11, ids["<|startofprev|>"], ids["<|nospeech|>"]],
        "begin_suppress_tokens": [5, end],
        "max_initial_timestamp_index": 50,
        "return_timestamps": False,
        "max_length": POSITIONS,
    }.items():
        setattr(reference.generation_config, name, value)
    reference.to(dtype).save_pretrained(folder)
    extractor = WhisperFeatureExtractor(chunk_length=WINDOW_S)
    extractor.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "WhisperTokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"})
    )
    return WhisperModel(folder, reference, extractor, tokenizer)


def _tokenizer() -> Tokenizer:
    """Merges over bytes, then what OpenAI's has behind them: the end, the languages, the tasks, the times."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(f"<|{i / 50:.2f}|>", normalized=False) for i in range(ROWS + 1)])
    return tokenizer
