from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.cli.up.run import curl_line, run_stack
from deploy.errors import CommandError
from tests.unit.deploy.cli.up.test_choices import spec

WORDS = {"served_model_name": "it's", "api_keys": ("secret",)}


def line(model: Path, architecture: str, model_type: str = "", **more: object) -> list[str]:
    """As a shell reads it."""
    (model / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": model_type}))
    stack: Any = SimpleNamespace(url="http://here:1", spec=spec(model=model, **more))
    return shlex.split(curl_line(stack).replace("\\\n", ""))


def test_a_question_is_shown_to_copy(tmp_path: Path) -> None:
    words = line(tmp_path, "LlamaForCausalLM", **WORDS)
    assert words[:2] == ["curl", "http://here:1/v1/chat/completions"]
    assert "Authorization: Bearer $BATON_API_KEY" in words
    assert json.loads(words[-1])["model"] == "it's"


def test_a_model_that_hears_is_given_a_recording(tmp_path: Path) -> None:
    words = line(tmp_path, "WhisperForConditionalGeneration", **WORDS)
    assert words[:2] == ["curl", "http://here:1/v1/audio/transcriptions"]
    assert words[-4:] == ["-F", "file=@speech.mp3", "-F", "model=it's"]
    assert "Authorization: Bearer $BATON_API_KEY" in words


def test_an_encoder_is_asked_for_what_it_makes(tmp_path: Path) -> None:
    words = line(tmp_path, "DebertaV2ForSequenceClassification", "deberta-v2", **WORDS)
    assert words[:2] == ["curl", "http://here:1/pooling"]
    assert json.loads(words[-1]) == {"model": "it's", "input": "What is the capital of France?"}


@pytest.mark.parametrize("settings", [{}, {"gateway": {"keys_file": "f"}}])
def test_a_key_is_in_it_where_one_is_needed(tmp_path: Path, settings: dict[str, dict[str, str]]) -> None:
    words = line(tmp_path, "LlamaForCausalLM", settings=settings)
    assert any(word.startswith("Authorization") for word in words) == bool(settings)


def test_a_kernel_that_cannot_merge_pages_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.machine.equal_pages._PR_SET_MEMORY_MERGE", 1 << 30)  # which no kernel knows
    with pytest.raises(CommandError, match=r"--ksm: this kernel cannot merge equal pages \("):
        run_stack(spec(ksm=True))
