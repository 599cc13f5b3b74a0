"""Checkpoints of the newer layouts that other programs quantised: the logits are those of what codes stand for, as the
same layout gives them without codes, which other tests compare with `transformers`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.published_layouts import make_published
from tests.support.models.quantised_files import METHODS
from tests.support.models.rounded_models import SIZES
from tests.support.models.tiny_models import make_model
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

_LATENT = {"moe_intermediate_size": 64, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
_FAMILIES: dict[str, dict[str, Any]] = {
    "glm-5-next": _LATENT | {"linear_head_dim": 32, "linear_num_heads": 4},
    "hy4": _LATENT,
    "mistral-large-4": _LATENT,
}
"""So that inputs are whole groups."""
_QUANTISED = re.compile(
    r"layers\.\d+\..*\b(q_a_proj|q_b_proj|q_proj|k_proj|v_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|dense|query_key_value"
    r"|gate_proj|up_proj|down_proj|w[123]|wq_b|wkv_a_with_mqa|wkv_b|wo|linear_gate|[fg]_[ab]_proj)\.weight$"
)


def write_both(plain: Path, codes: Path, method: str) -> int:
    """To `codes`, the checkpoint that is in `plain` in codes, and to that what they stand for. How many matrices."""
    settings, write = METHODS[method]
    shutil.copytree(plain, codes)
    numbers = load_file(plain / "model.safetensors")
    tensors, count = dict(numbers), 0
    for name, weight in list(numbers.items()):
        outputs, inputs = weight.shape if weight.ndim == 2 else (1, 1)
        if _QUANTISED.search(name) and not re.search("vis", name) and not outputs % 8 and not inputs % 64:
            own, numbers[name] = write(weight.float().clone())
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{part}": each.contiguous() for part, each in own.items()}
            count += 1
    save_file({name: each.contiguous() for name, each in numbers.items()}, plain / "model.safetensors")
    save_file(tensors, codes / "model.safetensors")
    config = json.loads((codes / "config.json").read_text())
    (codes / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return count


def logits(path: Path, recorded: list[Tensor]) -> Tensor:
    """Of a prompt in chunks, and of what is written behind it."""
    driver = Driver(tiny_backend(path, ops="native", dtype="float32"), budget=33)
    recorded.clear()
    driver.add([3 + 7 * number % 150 for number in range(60)], 3)
    driver.run()
    return torch.cat(recorded)


@pytest.mark.parametrize(
    ("name", "method", "matrices"),
    [
        ("glm-5-next", "fp8 of blocks", 100),
        ("hy4", "awq", 20),
        ("mistral-large-4", "packed", 150),
        ("SarvamMoEForCausalLM", "gptq", 40),
        ("SarvamMLAForCausalLM", "fp8 of whole blocks", 40),
        ("Param2MoEForCausalLM", "packed", 40),
    ],
)
def test_codes_are_read_by_the_names_of_the_layout(
    name: str, method: str, matrices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tmp_path / "plain"
    if name in _FAMILIES:
        make_model(name, plain, **SIZES, **_FAMILIES[name])
    else:
        plain.mkdir()
        plain = make_published(name, plain).path
    assert write_both(plain, tmp_path / "codes", method) > matrices
    recorded = record_logits(monkeypatch)
    expected, found = (logits(path, recorded) for path in (plain, tmp_path / "codes"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)
