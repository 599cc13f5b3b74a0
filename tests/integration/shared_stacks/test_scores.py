"""Labels, scores and the order of documents through whole stacks, by plain HTTP and Cohere's client: equal to what
`transformers` computes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import httpx2
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.support.cluster.stack import RunningStack, running_stack
from tests.support.paths import DEMO_MODEL, REPOSITORY

QUERY = "Where is the lighthouse?"
JUDGES = ("Ġno", "Ġsaid")
DOCUMENTS = ["The capital of France is Paris.", "Once upon a time there was a lighthouse. " * 20, "fox", "3 + 4 = 7"]


def post(stack: RunningStack, path: str, **fields: Any) -> Any:
    answer = httpx2.post(f"{stack.url}{path}", json={"model": stack.model, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a head of one label, as a reranker made of a decoder has it."""
    folder = tmp_path_factory.mktemp("cross-encoder") / "model"
    shutil.copytree(DEMO_MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    changes = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "relevant"}, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config | changes))
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    tensors["score.weight"] = torch.randn(1, config["hidden_size"]) * 0.1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def labels(cross_encoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Two stages, so that the rank with the head has no embedding."""
    with running_stack(tmp_path_factory.mktemp("labels"), model=cross_encoder, pp=2) as stack:
        yield stack


@torch.inference_mode()
def test_scores_of_embeddings_are_cosines(ring: RunningStack) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model: Any = AutoModel.from_pretrained(DEMO_MODEL, dtype=torch.float32)

    def vector(text: str) -> Tensor:
        last: Tensor = model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(last, dim=0)

    wanted = [float(vector(QUERY) @ vector(document)) for document in DOCUMENTS]
    body = post(ring, "/score", text_1=QUERY, text_2=DOCUMENTS)
    assert [each["score"] for each in body["data"]] == pytest.approx(wanted, abs=1e-3)
    tokens = sum(len(tokenizer(text)["input_ids"]) for text in (QUERY, *DOCUMENTS))
    assert (body["usage"]["prompt_tokens"], body["usage"]["total_tokens"]) == (tokens, tokens)
    order = sorted(range(4), key=lambda number: -wanted[number])[:3]
    with cohere.ClientV2("no key", base_url=ring.url) as client:
        ranked = client.rerank(model=ring.model, query=QUERY, documents=DOCUMENTS, top_n=3)
    assert [each.index for each in ranked.results] == order
    scores = [each.relevance_score for each in ranked.results]
    assert scores == pytest.approx([wanted[number] for number in order], abs=1e-3)


def test_coheres_chats_say_what_openais_say(ring: RunningStack) -> None:
    asked: Any = {"model": ring.model, "messages": [{"role": "user", "content": QUERY}], "temperature": 0}
    chat = post(ring, "/v1/chat/completions", **asked, max_tokens=24)
    with cohere.ClientV2("no key", base_url=ring.url) as client:
        whole: Any = client.chat(**asked, max_tokens=24)
        events: list[Any] = list(client.chat_stream(**asked, max_tokens=24))
    text = "".join(event.delta.message.content.text for event in events if event.type == "content-delta")
    assert [part.text for part in whole.message.content] == [text] == [chat["choices"][0]["message"]["content"]]
    assert whole.usage.tokens.input_tokens == chat["usage"]["prompt_tokens"]
    assert events[-1].delta.usage.tokens == whole.usage.tokens


@torch.inference_mode()
def test_a_cross_encoder_reads_both_texts_at_once(labels: RunningStack, cross_encoder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(cross_encoder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(cross_encoder, dtype=torch.float32)
    pairs = [tokenizer(QUERY, document)["input_ids"] for document in DOCUMENTS]
    wanted = [float(model(torch.tensor([ids])).logits.sigmoid()) for ids in pairs]
    body = post(labels, "/v1/score", text_1=QUERY, text_2=DOCUMENTS)
    assert [each["score"] for each in body["data"]] == pytest.approx(wanted, abs=1e-4)
    short = tokenizer(QUERY, DOCUMENTS[1], truncation="longest_first", max_length=20)["input_ids"]
    (cut,) = post(labels, "/v1/score", text_1=QUERY, text_2=DOCUMENTS[1], truncate_prompt_tokens=20)["data"]
    assert cut["score"] == pytest.approx(float(model(torch.tensor([short])).logits.sigmoid()), abs=1e-4)
    ranked = post(labels, "/v1/rerank", query=QUERY, documents=DOCUMENTS, top_n=2)
    order = sorted(range(4), key=lambda number: -wanted[number])[:2]
    assert [(each["index"], each["document"]["text"]) for each in ranked["results"]] == [
        (number, DOCUMENTS[number]) for number in order
    ]
    (one,) = post(labels, "/classify", input="fox")["data"]
    (raw,) = post(labels, "/pooling", input="fox", use_activation=False)["data"]
    assert (one["label"], one["num_classes"]) == ("relevant", 1)
    assert one["probs"] == pytest.approx(torch.tensor(raw["data"]).sigmoid().tolist())


@torch.inference_mode()
def test_the_next_token_judges_a_pair_in_a_template(tmp_path: Path) -> None:
    """As Qwen3-Reranker is served, beside generation."""
    template = REPOSITORY / "docs" / "examples" / "qwen3_reranker.jinja"
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    no, yes = (tokenizer.convert_tokens_to_ids(token) for token in JUDGES)

    def judged(document: str) -> float:
        texts = [{"role": "query", "content": QUERY}, {"role": "document", "content": document}]
        ids = tokenizer.apply_chat_template(texts, chat_template=template.read_text(), return_tensors="pt")["input_ids"]
        assert tokenizer.decode(ids[0]).endswith("<think>\n\n</think>\n\n")
        return float(model(ids).logits[0, -1, [no, yes]].softmax(0)[1])

    options = [f"--classifier-from-token={token}" for token in JUDGES]
    with running_stack(tmp_path, more=[*options, f"--score-template={template}"]) as stack:
        body = post(stack, "/score", text_1=QUERY, text_2=DOCUMENTS)
        assert [each["score"] for each in body["data"]] == pytest.approx(list(map(judged, DOCUMENTS)), abs=1e-4)
        (said,) = post(stack, "/v1/completions", prompt="Once", max_tokens=3)["choices"]
        assert said["text"]


def test_a_classifier_says_what_it_serves(labels: RunningStack) -> None:
    for path, fields in (("/v1/embeddings", {"input": "x"}), ("/v1/completions", {"prompt": "x"})):
        answer = httpx2.post(f"{labels.url}{path}", json={"model": labels.model, **fields}, timeout=60)
        assert answer.status_code == 400
        assert "serves /classify" in answer.json()["error"]["message"]
