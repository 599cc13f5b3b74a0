"""Speculation and devices that cannot be had are refused before anything starts, by name and with what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.cli.up.choices import check_device, drafting
from deploy.errors import CommandError
from services.worker.config import WorkerConfig
from services.worker.distributed.communicator import SingleStage
from services.worker.models.config import ModelError
from services.worker.speculation.choice import draft_settings
from services.worker.speculation.settings import Method, read_speculation

NEED_A_MODEL: list[Method] = ["draft", "medusa", "eagle", "eagle3"]


def settings(method: Method, folder: Path) -> str:
    return json.dumps({"method": method, "model": str(folder)} if method in NEED_A_MODEL else {"method": method})


def worker(**different: object) -> WorkerConfig:
    chosen = {"engine": "e", "model": "m", "instance": "w", "nats_url": ["nats://h"], "rendezvous": "tcp://h:1"}
    return WorkerConfig(**(chosen | different))  # type: ignore[arg-type]


class TwoStages(SingleStage):
    stages = 2


@pytest.mark.parametrize("method", NEED_A_MODEL)
def test_methods_with_weights_do_not_go_with_pipeline_stages(method: Method, tmp_path: Path) -> None:
    text = settings(method, tmp_path)
    refusal = f"speculative: method {method} does not go with pipeline stages; ngram does"
    with pytest.raises(ModelError, match=refusal):
        draft_settings(read_speculation(text), TwoStages())
    with pytest.raises(ValueError, match=refusal):
        worker(speculative=text, pp=2, world_size=2)
    with pytest.raises(CommandError, match=refusal):
        drafting(text, device="cpu", stages=2)


def test_looking_up_goes_with_pipeline_stages(tmp_path: Path) -> None:
    text = settings("ngram", tmp_path)
    assert draft_settings(read_speculation(text), TwoStages()).max_tokens > 0
    assert worker(speculative=text, pp=2, world_size=2).speculation() == read_speculation(text)
    assert drafting(text, device="cpu", stages=2) is not None


@pytest.mark.parametrize("method", ["ngram", *NEED_A_MODEL])
def test_the_simulated_device_refuses_every_method_and_says_what_it_has(method: Method, tmp_path: Path) -> None:
    text = settings(method, tmp_path)
    with pytest.raises(ValueError, match="the simulated device drafts nothing; see sim_speculate"):
        worker(speculative=text, device="sim")
    with pytest.raises(CommandError, match="the simulated device drafts nothing"):
        drafting(text, device="sim", stages=1)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="nowhere: there is no such directory"):
        drafting(settings("eagle", tmp_path / "nowhere"), device=None, stages=1)


def test_a_device_that_nobody_brings_is_refused_with_those_that_there_are() -> None:
    for name in ("auto", "cpu", "cuda", "sim"):
        check_device(name)
    with pytest.raises(CommandError, match="--device gpu: no installed package brings it; there are: auto, cpu, cuda"):
        check_device("gpu")
