"""Sounds on one rank: what `transformers` generates behind them, cut, preempted, drafted and behind a shared prefix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.worker.speculation.settings import SpeculationSettings
from tests.support.models.embedded_prompts import prompt_embeds
from tests.support.models.sounds import sweep
from tests.support.models.tiny_hearing import HEARING, HearingModel, make_hearing_model
from tests.support.models.tiny_qwen_audio import WINDOW_S, Sound
from tests.support.worker.plan_driver import Driver, Sequence
from tests.support.worker.tiny_backend import tiny_backend

COUNT, NGRAM = 20, SpeculationSettings(method="ngram", prompt_lookup_min=1)
SHORT, LONG = sweep(0, 0.7), sweep(1, WINDOW_S + 1.1)
SOUND, NO_SOUND = {"type": "audio"}, {"type": "text", "text": "No sound at all, only a question."}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(each, marks=() if each in ("qwen3-asr", "granite-speech") else pytest.mark.extras)
        for each in HEARING
    ],
)
def test_greedy_text_behind_sounds_is_the_librarys(kind: str, tmp_path: Path) -> None:
    model = make_hearing_model(tmp_path, kind)
    compare = [{"type": "text", "text": "Compare"}, SOUND, {"type": "text", "text": "with"}, SOUND]
    chats = [([SOUND], [SHORT]), (compare, [LONG, SHORT]), ([NO_SOUND], [])]
    driver = Driver(tiny_backend(tmp_path, ops="native", speculation=NGRAM), budget=11, speculate=2)
    added = [_add_to(driver, model, *chat) for chat in chats]
    sequences, expected = [each for each, _ in added], [tokens for _, tokens in added]
    for steps in (3, 8):
        for _ in range(steps):
            driver.step()
        driver.preempt(sequences[1])
    while sequences[1].computed < 50:
        driver.step()
    again, _ = _add_to(driver, model, *chats[1])
    assert driver.share_prefix(again, sequences[1]) >= 48
    driver.run()
    assert [each.output for each in (*sequences, again)] == [*expected, expected[1]]
    assert len(set(map(tuple, expected))) == len(expected), "what is heard changes words"


def _add_to(
    driver: Driver, model: HearingModel, content: list[dict[str, str]], sounds: list[Sound]
) -> tuple[Sequence, list[int]]:
    """A chat as a sequence of the driver's, and what the library says to it."""
    inputs = model.inputs([{"role": "user", "content": content}], sounds)
    ids = inputs["input_ids"][0].tolist()
    stands = np.array(ids) == model.reference.config.audio_token_id
    embeds = None
    if sounds:
        rows, places = [model.rows_of(each) for each in sounds], np.flatnonzero(stands)
        firsts = places[np.cumsum([0, *(len(each) for each in rows[:-1])])]
        runs = tuple((int(first), len(each)) for first, each in zip(firsts, rows, strict=True))
        whole = prompt_embeds(torch.cat(rows))
        embeds = type(whole)(dtype=whole.dtype, size=whole.size, rows=whole.rows, runs=runs)
    asked = [0 if there else token for token, there in zip(ids, stands.tolist(), strict=True)]
    return driver.add(asked, COUNT, prompt_embeds=embeds), model.greedy_of(inputs, COUNT)
