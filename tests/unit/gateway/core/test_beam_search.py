"""Beam search finds the hypotheses that `transformers` finds, with the same scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.gateway.core.beam_search import BeamSearch
from tests.support.models.tiny_models import make_model

PADDING = 159
PROMPTS = ([7], list(range(60, 80)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    loaded = make_model("llama", tmp_path_factory.mktemp("beams")).reference
    # As it is, texts of random weights hardly ever end.
    head = loaded.get_output_embeddings()
    with torch.no_grad():
        head.weight[[2, 3, 4]] *= 3.0
    return loaded


@torch.inference_mode()
def search(model: Any, prompt: list[int], max_tokens: int, **settings: Any) -> BeamSearch:
    beams = BeamSearch(max_tokens=max_tokens, **settings)
    while not beams.over:
        batch = torch.tensor([[*prompt, *beam.tokens] for beam in beams.running])
        logprobs = torch.log_softmax(model(batch).logits[:, -1].float(), dim=-1)
        top = torch.topk(logprobs, min(beams.candidates, logprobs.shape[1]), dim=1)
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        beams.advance([list(zip(ids, values, strict=True)) for ids, values in rows])
    return beams


@pytest.mark.parametrize("ends", [(2,), (2, 3, 4), ()])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(("width", "length_penalty", "most"), [(2, 1.0, 12), (4, 0.0, 8), (3, -1.0, 9)])
def test_hypotheses_and_scores_are_those_of_transformers(
    model: Any,
    ends: tuple[int, ...],
    early_stopping: Any,
    width: int,
    length_penalty: float,
    most: int,
) -> None:
    for prompt in PROMPTS:
        beams = search(
            model,
            prompt,
            most,
            width=width,
            ends=ends,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        reference = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=most,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=list(ends) or None,
            pad_token_id=PADDING,
            return_dict_in_generate=True,
            output_scores=True,
        )
        found = [hypothesis.beam.tokens for hypothesis in beams.ended]
        lengths = [len(tokens) for tokens in found]
        expected = [
            tuple(sequence[len(prompt) :][:length].tolist())
            for sequence, length in zip(reference.sequences, lengths, strict=True)
        ]
        assert found == expected
        for sequence, length in zip(reference.sequences, lengths, strict=True):
            assert set(sequence[len(prompt) + length :].tolist()) <= {PADDING}, "the reference's goes on"
        assert [hypothesis.score for hypothesis in beams.ended] == pytest.approx(
            reference.sequences_scores.tolist(), rel=1e-5, abs=1e-4
        )


def test_the_texts_do_end_in_every_way(model: Any) -> None:
    """Else the comparison above would say little."""
    seen = {
        hypothesis.finish
        for prompt in PROMPTS
        for ends in ((2,), (2, 3, 4))
        for hypothesis in search(model, prompt, 12, width=4, ends=ends).ended
    }
    assert seen == {"stop", "length"}


def test_a_width_of_one_is_greedy() -> None:
    beams = BeamSearch(width=1, max_tokens=3, ends=(0,))
    for token in (7, 8, 9):
        assert beams.candidates == 2
        beams.advance([[(token, -0.5), (1, -2.0)]])
    (only,) = beams.ended
    assert (only.beam.tokens, only.finish, only.score) == ((7, 8, 9), "length", -0.5)


def test_a_trail_leads_back_to_the_beams_that_were_continued() -> None:
    beams = BeamSearch(width=2, max_tokens=2, ends=())
    beams.advance([[(1, -0.1), (2, -0.2), (3, -3.0), (4, -4.0)]])
    beams.advance([[(5, -9.0)], [(6, -0.1)]])
    assert [(h.beam.tokens, h.beam.trail) for h in beams.ended] == [((2, 6), (0, 1)), ((1, 5), (0, 0))]


def test_a_vocabulary_smaller_than_the_width_gives_fewer() -> None:
    beams = BeamSearch(width=4, max_tokens=1, ends=())
    beams.advance([[(0, -0.1), (1, -2.0)]])
    assert beams.over
    assert [hypothesis.beam.tokens for hypothesis in beams.ended] == [(0,), (1,)]
