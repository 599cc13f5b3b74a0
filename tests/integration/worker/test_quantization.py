"""Models whose weights are rounded as they are loaded, against `transformers` with the rounded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from services.worker.models.loaded_model import ModelImpl
from services.worker.ops.interface import OpsName
from services.worker.ops.quantized import SCHEMES, Code, Scheme
from tests.support.models.library_models import library_model
from tests.support.models.rounded_models import ROUNDED_INPUTS, SIZES, assert_same_steps, rounded
from tests.support.models.tiny_models import VOCABULARY, TinyModel, make_model
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import last_logits, record_logits
from tests.support.worker.tiny_backend import tiny_backend

CODES: tuple[Code, ...] = get_args(Code)
OUTPUT = 5
PROMPT = [3 + 7 * i % (VOCABULARY - 3) for i in range(40)]


def logits_of(model: TinyModel, recorded: list[Tensor], **settings: Any) -> tuple[Tensor, Tensor]:
    """Of every generated token: what was drawn from, and the reference's."""
    driver = Driver(tiny_backend(model.path, dtype="float32", **settings))
    recorded.clear()  # what it tried when it was started
    sequence = driver.add(PROMPT, OUTPUT)
    driver.run()
    return torch.cat(recorded[:OUTPUT]), model.logits(sequence.tokens)[len(PROMPT) - 1 : -1]


@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize("code", CODES)
def test_logits_are_those_of_the_rounded_weights(
    code: Code, ops: OpsName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("qwen2", tmp_path, **SIZES)
    exact = model.logits(PROMPT)
    rounded(model.reference, code)
    drawn, expected = logits_of(model, record_logits(monkeypatch), ops=ops, quantization=code)
    assert (drawn - expected).abs().max() < 1e-3
    assert (model.logits(PROMPT) - exact).abs().max() > 1e-2, "weights that were not rounded would agree, too"


@pytest.mark.parametrize(
    ("family", "code", "ops"),
    [
        ("qwen3-moe", "int4", "native"),
        ("qwen2-moe", "fp8", "native"),
        ("mixtral", "int8", "native"),
        ("qwen2-moe", "int4", "torch"),
        ("deepseek-v2", "int4", "native"),
    ],
)
def test_experts_are_rounded_too(
    family: str, code: Code, ops: OpsName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of groups of int4, and others whose experts have int8 in their place."""
    model = make_model(family, tmp_path, **SIZES)
    exact = model.logits(PROMPT)
    rounded(model.reference, code)
    drawn, expected = logits_of(model, record_logits(monkeypatch), ops=ops, quantization=code)
    assert (drawn - expected).abs().max() < 1e-3
    assert (model.logits(PROMPT) - exact).abs().max() > 1e-2, "weights that were not rounded would agree, too"


@pytest.mark.parametrize(
    ("architecture", "ops"), [("GPTNeoX", "torch"), ("GPT2", "native"), ("Cohere2", "native"), ("Falcon", "native")]
)
def test_a_model_of_transformers_is_rounded_too(
    architecture: str, ops: OpsName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One matrix for queries, keys and values; weights the other way round; a tied head; linear layers of its own."""
    model = library_model(architecture, tmp_path)
    exact = model.logits(PROMPT)
    rounded(model.reference, "int8")
    drawn, expected = logits_of(model, record_logits(monkeypatch), ops=ops, quantization="int8")
    assert (drawn - expected).abs().max() < 1e-3
    assert (model.logits(PROMPT) - exact).abs().max() > 1e-2, "weights that were not rounded would agree, too"


@pytest.mark.parametrize("code", CODES)
def test_a_family_of_ours_computed_by_transformers_is_rounded_alike(
    code: Code, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", tmp_path, **SIZES)
    rounded(model.reference, code)
    drawn, expected = logits_of(
        model, record_logits(monkeypatch), ops="native", quantization=code, model_impl="transformers"
    )
    assert (drawn - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("scheme", "model_impl", "ops"),
    [
        ("w8a8_int8", "native", "native"),
        ("w8a8_int8", "native", "torch"),
        ("w8a8_int8", "transformers", "native"),
        ("w8a8_fp8", "native", "torch"),
    ],
)
def test_activations_are_rounded_as_well(
    scheme: Scheme, model_impl: ModelImpl, ops: OpsName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", tmp_path, **SIZES)
    rounded(model.reference, ROUNDED_INPUTS[scheme])
    weights_alone = model.logits(PROMPT)
    rounded(model.reference, scheme)
    assert (model.logits(PROMPT) - weights_alone).abs().median() > 1e-2, "such a reference would agree with weights"
    recorded = record_logits(monkeypatch)
    backend = tiny_backend(tmp_path, dtype="float32", ops=ops, quantization=scheme, model_impl=model_impl)
    prompts = [PROMPT[first : first + 12] for first in range(0, 25, 4)]
    found = [last_logits(backend, prompt, recorded) for prompt in prompts]
    assert_same_steps(found, [model.logits(prompt)[-1] for prompt in prompts])


def test_native_operations_leave_rows_as_they_are_where_weights_are_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama", tmp_path, **SIZES)
    rounded(model.reference, "fp8")
    drawn, expected = logits_of(model, record_logits(monkeypatch), ops="native", quantization="w8a8_fp8")
    assert (drawn - expected).abs().max() < 1e-3


def test_keys_and_values_of_rounded_weights_are_nobody_elses(tmp_path: Path) -> None:
    path = make_model("llama", tmp_path).path
    digests = {tiny_backend(path, ops="native", quantization=each).kv.layout.model for each in ("auto", *SCHEMES)}
    assert len(digests) == 1 + len(SCHEMES)
