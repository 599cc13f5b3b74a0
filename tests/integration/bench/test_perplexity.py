"""`baton bench perplexity` with real engines, against `transformers` with the same weights."""

from __future__ import annotations

import json
from math import exp
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from deploy.cli.bench import with_model
from deploy.model_choice import DEMO_MODEL
from services.bench.__main__ import main
from services.bench.engine.perplexity import windows
from tests.support.models.rounded_models import rounded

LENGTH, STRIDE = 48, 20


def reference_perplexity(model: torch.nn.Module, tokens: list[int], first: int = 1) -> float:
    losses = []
    for part in windows(tokens, LENGTH, STRIDE, first):
        with torch.inference_mode():
            logits = model(torch.tensor([part.tokens])).logits[0, :-1].double()
        scores = logits.log_softmax(-1).gather(1, torch.tensor(part.tokens[1:])[:, None])[:, 0]
        losses += (-scores[len(scores) - part.scored :]).tolist()
    return exp(sum(losses) / len(losses))


def run(folder: Path, *flags: str) -> int:
    argv = [
        "perplexity",
        "--dtype=float32",
        "--device=cpu",
        "--threads=1",
        f"--output-json={folder / 'r.json'}",
        *flags,
    ]
    return main(with_model(argv, folder))


def test_a_text_is_predicted_as_the_reference_does_by_the_same_weights(tmp_path: Path) -> None:
    text = "Mia the fox lives in a small house. She has seven red hens and a green boat. " * 3
    (tmp_path / "text.txt").write_text(text)
    flags = (f"--text={tmp_path / 'text.txt'}", f"--max-length={LENGTH}", f"--stride={STRIDE}")
    assert run(tmp_path, *flags, "--quantization=auto,int8") == 0
    plain, int8 = json.loads((tmp_path / "r.json").read_text())["perplexity"]
    tokens = list(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(text).ids)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    assert (plain["quantization"], plain["tokens"]) == ("auto", len(tokens) - 1)
    assert plain["perplexity"] == pytest.approx(reference_perplexity(model, tokens), rel=1e-3)
    rounded(model, "int8")
    assert int8["perplexity"] == pytest.approx(reference_perplexity(model, tokens), rel=1e-3)
    assert int8["against_first"] == pytest.approx(int8["perplexity"] / plain["perplexity"] - 1)


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        ("a", (), "a text of two tokens or more is needed"),
        ("Once upon a time", ("--max-length=1",), "--max-length 1: 2 tokens at least are needed"),
        ("Once upon a time", ("--max-length=8", "--stride=8"), "and more than --stride"),
    ],
)
def test_what_cannot_be_scored_is_said(
    text: str, flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(text)
    assert run(tmp_path, f"--text={tmp_path / 'text.txt'}", "--quantization=auto", *flags) == 1
    assert said in capsys.readouterr().err
