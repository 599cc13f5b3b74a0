"""Whole stacks of encoders say what sentence-transformers itself says of the same folders."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from openai import OpenAI

from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.models.tiny_encoders import LONGEST, make_encoder

TEXTS = ["w5 w6 w7", " ".join(f"w{4 + i}" for i in range(LONGEST - 2)), "w9", "w30 w20 w10 w5"]


@pytest.fixture(scope="module")
def library() -> Any:
    """Imported here, as every run of tests reads this file, and that takes seconds."""
    return import_module("sentence_transformers")


@pytest.fixture(scope="module")
def modules(library: Any) -> Any:
    return import_module(f"{library.__name__}.sentence_transformer.modules")


def post(stack: RunningStack, path: str, **fields: Any) -> Any:
    answer = httpx2.post(f"{stack.url}{path}", json={"model": stack.model, **fields}, timeout=60)
    return answer.json()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        pytest.param("Bert", "max", marks=pytest.mark.slow),
        pytest.param("Roberta", "cls", marks=pytest.mark.slow),
        pytest.param("ModernBert", "mean", marks=pytest.mark.slow),
        pytest.param("MPNet", "mean", marks=pytest.mark.slow),
        ("Gemma3Text", "mean"),
    ],
)
def test_embeddings_are_those_of_sentence_transformers(
    kind: str, mode: str, library: Any, modules: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    make_encoder(kind, folder)
    parts: list[Any] = [modules.Transformer(str(folder)), modules.Pooling(48, pooling_mode=mode)]
    if kind == "Gemma3Text":  # as EmbeddingGemma has it
        parts += [modules.Dense(*sizes, bias=False, activation_function=None) for sizes in ((48, 96), (96, 48))]
    reference = library.SentenceTransformer(modules=[*parts, modules.Normalize()], device="cpu")
    reference.save(str(folder))
    wanted = reference.encode(TEXTS, batch_size=1)
    with running_stack(tmp_path, model=folder) as stack:
        with OpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
            answer = client.embeddings.create(model=stack.model, input=TEXTS)
        assert torch.tensor([each.embedding for each in answer.data]).sub(torch.tensor(wanted)).abs().max() < 1e-4
        refused = post(stack, "/v1/embeddings", input=" ".join(["w5"] * LONGEST))["error"]
        assert (refused["param"], refused["code"]) == ("input", "context_length_exceeded")
        refused = post(stack, "/v1/completions", prompt="w5")["error"]
        assert "it serves /v1/embeddings" in refused["message"]


SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("Roberta", "DebertaV2")]


@pytest.mark.parametrize("kind", ["Bert", *SLOW_KINDS])
def test_scores_are_those_of_a_cross_encoder(kind: str, library: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_encoder(kind, folder, labels=1)
    reference = library.CrossEncoder(str(folder), device="cpu")
    documents = ["w5 w6 w7", "w9 " * 40, "w30 w20 w10 w5"]
    wanted = reference.rank("w5 w50", documents, batch_size=1)
    with running_stack(tmp_path, model=folder) as stack:
        ranked = post(stack, "/v1/rerank", query="w5 w50", documents=documents)["results"]
        assert [each["index"] for each in ranked] == [each["corpus_id"] for each in wanted]
        for found, each in zip(ranked, wanted, strict=True):
            assert math.isclose(found["relevance_score"], float(each["score"]), abs_tol=1e-4)
