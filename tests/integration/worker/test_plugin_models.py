"""Architectures of installed packages on a backend that computes: the example in docs/examples, and broken ones."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from services.scheduler.core.limits import EngineLimits
from services.worker.models.config import ModelError
from services.worker.models.lora.slots import LoraSettings
from services.worker.speculation.settings import SpeculationSettings
from shared.ids import ModelName
from tests.support.models.library_models import library_model
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.plugin_packages import pip_installed, written_package
from tests.support.worker.launched_rank import launching
from tests.support.worker.library_situations import OUTPUT, check_mixed_batch, check_resumed_sequences, prompt
from tests.support.worker.rank_processes import rank_processes
from tests.support.worker.tiny_backend import tiny_backend

OTHERS = """
from msgspec.structs import replace
from services.worker.models.plugins.interface import ModelArchitecture

class Renamed(ModelArchitecture):
    "Llama by other names."

    def base_config(self):
        return {"hidden_size": self.raw["width"]} | dict(self.raw)

    def tensor_name(self, name):
        return name.replace("model.", "decoder.", 1)

class Refusing(ModelArchitecture):
    def __init__(self, raw):
        raise ValueError("hidden_act 'relu' is not supported")

class Confused(ModelArchitecture):
    def config(self, config):
        return config.nothing

class Based(ModelArchitecture):
    base = "BloomForCausalLM"

class Llama(ModelArchitecture):
    def __init__(self, raw):
        raise AssertionError("built-in names cannot be taken over")
"""
ENTRIES = {
    "RenamedForCausalLM": "others:Renamed",
    "RefusingForCausalLM": "others:Refusing",
    "ConfusedForCausalLM": "others:Confused",
    "BasedForCausalLM": "others:Based",
    "GoneForCausalLM": "others:Gone",
    "LlamaForCausalLM": "others:Llama",
}


@pytest.fixture(scope="module", autouse=True)
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Both on the path, of processes that are started from here too."""
    granite = pip_installed("granite-model", tmp_path_factory)
    others = written_package(tmp_path_factory.mktemp("others"), "others", OTHERS, {"baton.models": ENTRIES})
    with pytest.MonkeyPatch.context() as patch:
        for folder in map(str, (granite, others)):
            patch.syspath_prepend(folder)
            patch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
        yield
    for name in ("granite_model", "others"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Four multipliers, none of them 1."""
    return library_model("Granite", tmp_path_factory.mktemp("model"), embedding_multiplier=3.0)


@pytest.mark.parametrize("ops", ["torch", "native"])
def test_an_architecture_of_a_package_says_what_the_library_does(granite: TinyModel, ops: str) -> None:
    backend = tiny_backend(granite.path, ops=ops)
    assert type(backend.rank.decoder).__name__ == "GraniteDecoder"
    assert backend.rank.decoder.ops_name.startswith(ops)
    check_mixed_batch(granite, backend)
    backend.reset()
    check_resumed_sequences(granite, backend)
    library = tiny_backend(granite.path, model_impl="transformers")
    assert library.rank.decoder.ops_name.startswith("transformers")
    assert library.kv.layout.model != backend.kv.layout.model, "nobody takes the blocks of the one for the other's"


def test_it_is_launched_ahead_and_verifies_drafts(granite: TinyModel) -> None:
    check_mixed_batch(granite, launching(tiny_backend(granite.path)))
    ngrams = SpeculationSettings(method="ngram", num_speculative_tokens=3)
    check_mixed_batch(granite, tiny_backend(granite.path, speculation=ngrams))


def test_ranks_and_stages_say_the_same(granite: TinyModel, tmp_path: Path) -> None:
    limits = EngineLimits(run_ahead=1, plan_late=False, max_batch_tokens=48, max_running=4)
    asked = [prompt(length, seed) for seed, length in enumerate((7, 33, 60))]
    with rank_processes(2, tmp_path) as ranks:
        for tp, stages in ((2, 1), (1, 2)):
            engine = ranks.serve(granite.path, ops="native", limits=limits, tp=tp, stages=stages)
            requests = [engine.ask(tokens, OUTPUT) for tokens in asked]
            engine.run()
            assert [request.tokens for request in requests] == [granite.greedy(tokens, OUTPUT) for tokens in asked]


def renamed(source: Path, folder: Path, architecture: str) -> Path:
    """The checkpoint with other names for tensors and for `hidden_size`."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    save_file({name.replace("model.", "decoder.", 1): each for name, each in load_file(file).items()}, file)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(
        config.replace("LlamaForCausalLM", architecture).replace('"hidden_size"', '"width"')
    )
    return folder


def test_tensors_and_keys_may_have_other_names(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "llama")
    check_mixed_batch(model, tiny_backend(model.path))
    check_mixed_batch(model, tiny_backend(renamed(model.path, tmp_path / "model", "RenamedForCausalLM"), ops="native"))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Refusing", r"others 1.0 \(RefusingForCausalLM = others:Refusing\): hidden_act 'relu' is not supported"),
        ("Confused", r"others 1.0 \(ConfusedForCausalLM = others:Confused\): AttributeError"),
        ("Based", "'BloomForCausalLM'. is not supported; supported: LlamaForCausalLM"),
        ("Gone", r"architectures GoneForCausalLM: others 1.0 \(GoneForCausalLM = others:Gone\): AttributeError"),
    ],
)
def test_what_a_package_does_wrong_is_said_by_its_name(name: str, why: str, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    config = (model.path / "config.json").read_text()
    (model.path / "config.json").write_text(config.replace("LlamaForCausalLM", f"{name}ForCausalLM"))
    with pytest.raises(ModelError, match=why):
        tiny_backend(model.path)


def test_what_it_is_not_served_with_is_refused(granite: TinyModel) -> None:
    with pytest.raises(ModelError, match=r"lora: a model of granite-model 1.0 \(.*\) can have no adapters"):
        tiny_backend(granite.path, loras=LoraSettings(folders=((ModelName("a"), granite.path),)))
    with pytest.raises(ModelError, match=r"layer-wise KV connector .* granite-model 1.0"):
        tiny_backend(granite.path, on_layer=lambda _: None)
