"""When tokens and words of a sound were said, beside what `transformers` says of the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import WhisperTokenizer
from transformers.models.whisper.generation_whisper import _dynamic_time_warping
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from services.encoder.audio_tower import AudioTower, Samples
from services.encoder.token_aligner import warped
from services.encoder.tower import TowerUnusable
from services.gateway.api.audio.segments import WindowTimes
from services.gateway.api.audio.words import words_of
from shared.messages.encoder import WrittenTokens
from shared.messages.gateway import LogprobText, PositionLogprobs
from shared.models.audio_models import read_audio_model
from shared.packing import pack
from tests.support.models.sounds import SAMPLE_RATE, sweep
from tests.support.models.tiny_whisper import make_whisper

HEADS = [[1, 0], [1, 3], [2, 2]]


@pytest.mark.parametrize("heads", [HEADS, None])
def test_tokens_end_when_the_library_says(tmp_path: Path, heads: list[list[int]] | None) -> None:
    """Of tokens that `generate` draws, times among them; of a checkpoint without heads, by the upper half's."""
    model = make_whisper(tmp_path)
    settings = model.path / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_bytes()), "alignment_heads": heads}))
    model.reference.generation_config.alignment_heads = heads or [
        [layer, head] for layer in (1, 2) for head in range(4)
    ]
    tower = AudioTower(model.path)
    moments = set[float]()
    for sound in (sweep(2, 0.7), *(np.concatenate([sweep(seed + i, 0.5) for i in range(4)]) for seed in range(3))):
        features = model.extractor(sound, sampling_rate=SAMPLE_RATE, return_tensors="pt", return_attention_mask=True)
        output = model.reference.generate(
            features.input_features,
            attention_mask=features.attention_mask,
            language="en",
            task="transcribe",
            return_timestamps=True,
            return_token_timestamps=True,
            return_dict_in_generate=True,
            return_segments=True,
            max_new_tokens=20,
            do_sample=False,
        )
        result: Any = output["segments"][0][0]["result"]
        prompt = model.prompt(times=True)
        drawn = result["sequences"].tolist()
        drawn = drawn[len(prompt) :] if drawn[: len(prompt)] == prompt else drawn
        expected = result["token_timestamps"].tolist()[-len(drawn) :]
        fed = drawn[:-1]  # the library has no weights of the last one
        found = tower.times(Samples(sound.tobytes()), WrittenTokens(pack(prompt + fed), len(prompt)))
        assert np.allclose(found, expected[:-1], atol=1e-6)
        moments.update(found)
    assert len(moments) > 12, "a random model's tokens are not all said at once"


def test_paths_are_the_librarys() -> None:
    random = np.random.default_rng(0)
    for tokens, rows in ((1, 1), (1, 9), (9, 1), (7, 40), (40, 7), (30, 100)):
        costs = np.round(random.normal(size=(tokens, rows)), 1)  # with ties
        of_tokens, of_rows = _dynamic_time_warping(costs)
        firsts = np.pad(np.diff(of_tokens), (1, 0), constant_values=1).astype(bool)
        assert warped(costs) == of_rows[firsts].tolist()


def test_what_cannot_be_aligned_is_refused(tmp_path: Path) -> None:
    model = make_whisper(tmp_path)
    tower, window = AudioTower(model.path), Samples(sweep(0).tobytes())
    assert tower.times(window, WrittenTokens(pack(model.prompt()), 4)) == ()
    for ids, begin in (([1] * 81, 4), ([10**6], 1), ([1], 2)):
        with pytest.raises(TowerUnusable, match="tokens are not allowed"):
            tower.times(window, WrittenTokens(pack(ids), begin))
    settings = model.path / "generation_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_bytes()), "alignment_heads": [[3, 0]]}))
    with pytest.raises(TowerUnusable, match=r"alignment_heads: \[3, 0\] is not allowed"):
        AudioTower(model.path).times(window, WrittenTokens(pack([1, 2]), 1))


@pytest.mark.parametrize("language", ["en", "zh"])
def test_words_are_the_librarys(tmp_path: Path, language: str) -> None:
    """With punctuation before and behind, letters of several tokens, and a time within."""
    model = make_whisper(tmp_path)
    audio = read_audio_model(model.path)
    assert audio is not None
    tokenizer: Any = WhisperTokenizer.from_pretrained(model.path)
    ids: list[int] = model.tokenizer.encode(
        ' The "quick" brown-fox, (jumps) ¿naïve? 漢字、 it\'s 1,234.5 — over!', add_special_tokens=False
    ).ids
    names = {"en": "english", "zh": "chinese"}
    words, _, indices = _combine_tokens_into_words(tokenizer, ids, names[language])
    drawn = [*ids, audio.end]
    positions = [
        PositionLogprobs(LogprobText("", _raw(model.tokenizer.id_to_token(each) or ""), -1.0, each), ())
        for each in drawn
    ]
    ends = [(number + 1) / 50 for number in range(len(ids))]
    found = list(words_of(positions, ends, audio, WindowTimes(10.0, 100.0), language))
    assert [(each.text, round(each.start, 2), round(each.end, 2)) for each in found] == [
        (word, round(10 + of[0] / 50, 2), round(10 + (of[-1] + 1) / 50, 2))
        for word, of in zip(words, indices, strict=True)
        if word.strip()
    ]
    assert len(found) > 8


def _raw(token: str) -> bytes:
    """A token's bytes, which byte-level merges write as letters."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    return bytes(letters[letter] for letter in token) if all(letter in letters for letter in token) else b""
