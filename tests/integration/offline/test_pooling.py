"""`LLM.embed`, `classify`, `score` and `encode`: what `transformers` computes of the same prompts, by DistilBERT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from services.offline.errors import InvalidRequest
from services.offline.llm import LLM
from services.offline.pooling import PoolingParams
from tests.support.models.tiny_encoders import make_encoder

TEXTS = ["w5 w6", "w7 w8 w9 w10", "w11 " * 30]
NEAR = {"rtol": 1e-4, "atol": 1e-4}


@torch.inference_mode()
def test_vectors_and_scores_of_embeddings(tmp_path: Path) -> None:
    reference, tokenizer = make_encoder("DistilBert", tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = [tokenizer(text)["input_ids"] for text in TEXTS]
    states = [reference(torch.tensor([each])).last_hidden_state[0] for each in ids]
    vectors = [torch.nn.functional.normalize(each.mean(0), dim=0) for each in states]
    with LLM(str(tmp_path), progress=False, settings={"worker.pooling_type": "mean"}) as llm:
        found = llm.embed(TEXTS)
        assert [each.prompt_token_ids for each in found] == ids
        for each, vector in zip(found, vectors, strict=True):
            torch.testing.assert_close(torch.tensor(each.outputs.embedding), vector, **NEAR)
        (same,) = llm.embed({"prompt_token_ids": ids[0]})
        assert same.outputs == found[0].outputs
        raw = PoolingParams(use_activation=False)
        (plain,) = llm.embed([TEXTS[0]], pooling_params=raw)
        torch.testing.assert_close(torch.tensor(plain.outputs.embedding), states[0].mean(0), **NEAR)
        (each_token,) = llm.encode(TEXTS[0], raw, pooling_task="token_embed")
        torch.testing.assert_close(torch.tensor(each_token.outputs.data), states[0], **NEAR)
        scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:])]
        assert scores == pytest.approx([float(vectors[0] @ vector) for vector in vectors[1:]], abs=1e-4)
        assert llm.encode(TEXTS[0]) == ids[0]
        for wrong, why in (
            (lambda: llm.score(TEXTS, TEXTS[:2]), "data_1: 3 texts beside 2 in data_2"),
            (lambda: llm.embed(TEXTS, pooling_params=[raw]), "pooling_params: 1 for 3 prompts"),
            (lambda: llm.embed("w5", pooling_params=PoolingParams(dimensions=99)), "dimensions"),
            (lambda: llm.classify("w5"), "labels"),
        ):
            with pytest.raises(InvalidRequest, match=why):
                wrong()


@torch.inference_mode()
def test_labels_of_a_classifier(tmp_path: Path) -> None:
    reference, tokenizer = make_encoder("DistilBert", tmp_path, labels=3), AutoTokenizer.from_pretrained(tmp_path)
    with LLM(str(tmp_path), progress=False) as llm:
        for text, each in zip(TEXTS, llm.classify(TEXTS), strict=True):
            logits = reference(**tokenizer(text, return_tensors="pt")).logits[0]
            torch.testing.assert_close(torch.tensor(each.outputs.probs), logits.softmax(0), **NEAR)
            assert each.outputs.label == reference.config.id2label[int(logits.argmax())]
