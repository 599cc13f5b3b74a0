"""Encoders with a decoder on one rank: what `transformers` generates of the same prompts, in each state of a batch."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.models.config import ModelError
from services.worker.models.expert_parallel.settings import ExpertSettings
from services.worker.models.lora.slots import LoraSettings
from services.worker.ops.interface import OpsName, OpsUnavailable
from services.worker.speculation.settings import SpeculationSettings
from tests.support.models.rounded_models import rounded
from tests.support.models.tiny_encoder_decoders import FORCED, FORCING, KINDS, POSITIONS, make_encoder_decoder
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend

OUTPUT = 60
IN_EACH_RUN = {"bart": "native", "umt5": "native", "t5": "torch"}
PROMPTS = (
    "The quick brown fox jumps over the lazy dog",
    "Hello there, how are you today?",
    "one two three",
)


@pytest.mark.features("encoder-decoder", "chunked prefill", "preemption", "prefix cache")
@pytest.mark.parametrize(
    ("kind", "ops"),
    [pytest.param(kind, ops, id=kind) for kind, ops in IN_EACH_RUN.items()]
    + [pytest.param(kind, "native", id=kind, marks=pytest.mark.extras) for kind in KINDS if kind not in IN_EACH_RUN],
)
def test_prompts_are_answered_as_by_the_library(tmp_path: Path, kind: str, ops: OpsName) -> None:
    """Alone and side by side, behind a beginning that is cut into steps, preempted, and behind rows that another
    sequence has brought; one that is drawn for without rows is left in peace."""
    model = make_encoder_decoder(tmp_path, kind)
    try:
        backend = tiny_backend(model.path, ops=ops)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    card = backend.card.encoder_decoder
    assert card is not None
    assert card.decoder_prompt == model.start
    assert (FORCED in model.start) == (kind in FORCING)
    driver = Driver(backend, budget=7)
    prompts = [model.ids(each) for each in PROMPTS]
    sequences = [driver.add(list(model.start), OUTPUT, prompt_embeds=model.rows(each)) for each in prompts]
    begin = (model.start[0], *range(40, 59))
    begun = driver.add(list(begin), OUTPUT, prompt_embeds=model.rows(prompts[0]))
    silent = driver.add(list(model.start), 3)
    for _ in range(12):
        driver.step()
    driver.preempt(sequences[1])
    again = driver.add(list(model.start), OUTPUT, prompt_embeds=model.rows(prompts[0]))
    driver.share_encoded(again, sequences[0])
    driver.run()
    expected = [model.generated(each, OUTPUT) for each in prompts]
    for sequence, wanted in zip([*sequences, again], [*expected, expected[0]], strict=True):
        assert sequence.output[: len(wanted)] == wanted
    assert kind not in IN_EACH_RUN or expected[0] != expected[1]
    wanted = model.generated(prompts[0], OUTPUT, begin)
    assert begun.output[: len(wanted)] == wanted
    assert len(silent.output) == 3


@pytest.mark.features("encoder-decoder", "quantization")
def test_a_decoder_with_rounded_weights_answers_as_the_librarys(tmp_path: Path) -> None:
    """The decoder's are rounded, the encoder's are not."""
    model = make_encoder_decoder(tmp_path, "t5")
    driver = Driver(tiny_backend(model.path, dtype="float32", quantization="int4"))
    prompts = [model.ids(each) for each in PROMPTS]
    sequences = [driver.add(list(model.start), OUTPUT, prompt_embeds=model.rows(each)) for each in prompts]
    driver.run()
    exact, encoder = [model.generated(each, OUTPUT) for each in prompts], copy.deepcopy(model.reference.encoder)
    rounded(model.reference, "int4")
    model.reference.encoder = encoder
    expected = [model.generated(each, OUTPUT) for each in prompts]
    assert [each.output[: len(wanted)] for each, wanted in zip(sequences, expected, strict=True)] == expected
    assert expected != exact


def test_a_longer_context_than_there_are_positions_is_refused(tmp_path: Path) -> None:
    model = make_encoder_decoder(tmp_path, "bart")
    assert tiny_backend(model.path).card.max_model_len == POSITIONS
    with pytest.raises(ModelError, match=f"the model has {POSITIONS} positions"):
        tiny_backend(model.path, max_model_len=POSITIONS + 1)


@pytest.mark.features("encoder-decoder", "tensor parallel", refused=True)
@pytest.mark.features("encoder-decoder", "pipeline parallel", refused=True)
@pytest.mark.features("encoder-decoder", "data parallel", refused=True)
@pytest.mark.features("encoder-decoder", "expert parallel", refused=True)
@pytest.mark.features("encoder-decoder", "sequence parallel", refused=True)
@pytest.mark.features("encoder-decoder", "context parallel", refused=True)
@pytest.mark.features("encoder-decoder", "speculative", refused=True)
@pytest.mark.features("encoder-decoder", "KV connector", refused=True)
@pytest.mark.features("encoder-decoder", "LoRA", refused=True)
@pytest.mark.features("encoder-decoder", "pooling", refused=True)
@pytest.mark.features("encoder-decoder", "prompt embeds", refused=True)
@pytest.mark.features("encoder-decoder", "hybrid KV cache", refused=True)
@pytest.mark.refuses("encoder-decoders (BART, T5, …)", "--load-format dummy")
def test_what_they_are_not_combined_with_is_refused_at_start(tmp_path: Path) -> None:
    path = make_encoder_decoder(tmp_path, "t5").path
    several_ranks, several_stages = SimpleNamespace(world_size=2), SimpleNamespace(stages=2)
    refused: dict[str, dict[str, Any]] = {
        "speculative": {"speculation": SpeculationSettings(method="ngram")},
        "tp": {"communicator": several_ranks},
        "pp": {"pipeline": several_stages},
        "data_parallel_size": {"group": SimpleNamespace()},
        "enable_sp": {"shared_rows": 1},
        "prefill_context_parallel_size": {"context_rows": 1},
        "enable_expert_parallel": {"experts": ExpertSettings(parallel=True)},
        "load_format dummy": {"load_format": "dummy"},
        "kv_connector": {"kv_connector": True},
        "hybrid_kv_cache on": {"hybrid_kv_cache": "on"},
        "enable_prompt_embeds": {"prompt_embeds": True},
        "lora": {"loras": LoraSettings(at_run_time=True)},
        "pooling_type": {"pooling_type": "mean"},
    }
    for setting, different in refused.items():
        with pytest.raises(ModelError, match=setting):
            tiny_backend(path, **different)
