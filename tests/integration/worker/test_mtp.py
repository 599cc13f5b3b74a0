"""The module that a model is published with drafts what `transformers`' parts of it draw, and changes no text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.models.config import ModelError
from services.worker.ops.interface import OpsName
from services.worker.speculation.hidden_state_proposer import HiddenStateProposer
from services.worker.speculation.settings import SpeculationSettings
from tests.support.models.tiny_glm_vl import make_glm_model
from tests.support.models.tiny_models import make_model
from tests.support.models.tiny_mtp import make_mtp
from tests.support.worker.plan_driver import Driver
from tests.support.worker.tiny_backend import tiny_backend

MTP = SpeculationSettings(method="mtp", num_speculative_tokens=3)
PROMPTS = [[5, 60, 17, 33, 90, 8, 44] * 5, [9], [3 + 11 * i % 150 for i in range(33)]]
OUTPUT = 16


@pytest.mark.features("speculative", "chunked prefill", "preemption")
@pytest.mark.parametrize(
    ("family", "ops"),
    [("deepseek-v3", "torch"), ("qwen3-next", "native"), ("deepseek-v3", "native"), ("deepseek-v3.2", "native")],
)
def test_the_module_draws_what_transformers_parts_draw_and_changes_no_text(
    tmp_path: Path, family: str, ops: OpsName, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_mtp(family, tmp_path)
    backend = tiny_backend(made.model.path, dtype="float32", ops=ops, speculation=MTP)
    proposer = backend.rank.drafting.proposer
    assert isinstance(proposer, HiddenStateProposer)
    head, logits = proposer._head, []

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        logits.append(found := type(head).logits(head, hidden))  # type: ignore[arg-type]
        return found

    expected = [made.model.greedy(prompt, OUTPUT) for prompt in PROMPTS]
    driver = Driver(backend, budget=29, speculate=3)
    sequences = [driver.add(prompt, OUTPUT) for prompt in PROMPTS]
    while len(sequences[2].output) < 6:
        driver.step()
    driver.preempt(sequences[2])
    driver.run()
    assert [sequence.output for sequence in sequences] == expected
    assert driver.drafted > 0

    monkeypatch.setattr(head, "logits", watched)
    backend.reset()
    driver = Driver(backend, budget=13, speculate=1)
    sequence = driver.add(PROMPTS[2], 2)
    driver.run()
    with torch.no_grad():
        base = made.model.reference.model(torch.tensor([PROMPTS[2]])).last_hidden_state[0]
    reference = made.logits(base, [*PROMPTS[2][1:], sequence.output[0]])
    # By native operations drafters compute in bfloat16, where the processor multiplies that.
    most = 1e-4 if ops == "torch" else 0.03 * float(reference[-1].abs().max())
    torch.testing.assert_close(logits[0][0].float(), reference[-1], atol=most, rtol=1e-4)


@pytest.mark.parametrize("ops", ["torch", "native"])
@pytest.mark.parametrize("sees", [False, True])
def test_a_checkpoint_without_a_module_is_refused(tmp_path: Path, ops: OpsName, sees: bool) -> None:
    folder = make_glm_model(tmp_path).path if sees else make_model("llama", tmp_path).path
    with pytest.raises(ModelError, match=r"method mtp: .* neither mtp\.fc\.weight nor model\.layers\.3\.eh_proj"):
        tiny_backend(folder, ops=ops, speculation=MTP)


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3-next"])
def test_a_module_is_made_up_where_the_model_is(tmp_path: Path, family: str) -> None:
    model = make_model(family, tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    outputs = []
    for speculation in (None, MTP):
        driver = Driver(tiny_backend(model.path, load_format="dummy", speculation=speculation), speculate=3)
        sequence = driver.add(PROMPTS[0], OUTPUT)
        driver.run()
        outputs.append(sequence.output)
    assert driver.drafted > 0
    assert outputs[0] == outputs[1]
