"""Checkpoints that are wrong, cut short, of mixed types or malicious: refused in words, before a weight is read; by our
own reader, where `transformers` computes, and of adapters. Those of several float types are served."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from services.worker.models.config import ModelError
from services.worker.models.fallback import library_model as fallback
from services.worker.models.hf_config import read_model_config
from services.worker.models.lora.adapter_files import read_adapter
from services.worker.models.tensor_file import TensorFiles
from services.worker.models.weight_files import INDEX, SINGLE
from shared.ids import ModelName
from tests.support.models.library_models import library_model
from tests.support.models.tiny_adapters import write_adapter
from tests.support.models.tiny_models import TinyModel, make_model
from tests.support.worker.library_situations import OUTPUT, prompt
from tests.support.worker.plan_driver import Driver
from tests.support.worker.recorded_logits import record_logits
from tests.support.worker.tiny_backend import tiny_backend

LAST = "model.layers.2.self_attn.o_proj.weight"
Spoil = Callable[[Path], None]
"""Spoils a file of tensors, in place."""


@pytest.fixture(scope="module", params=["native", "transformers"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp(request.param)
    return make_model("llama", folder) if request.param == "native" else library_model("Cohere2", folder)


@pytest.fixture
def folder(model: TinyModel, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(model.path, tmp_path / "model"))


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever takes memory for weights fails."""
    plain = fallback._from_pretrained

    def dry(*args: Any, device_map: torch.device | None = None) -> Any:
        assert device_map is not None, "transformers reads weights"
        return plain(*args, device_map=device_map)

    def reads(*_: Any) -> None:
        raise AssertionError("a weight is read")

    monkeypatch.setattr(fallback, "_from_pretrained", dry)
    monkeypatch.setattr(TensorFiles, "read_together", reads)


class Payload:
    """What a pickle does when it is loaded."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._trace,)


def header(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """With another header, of the right length, before the same elements."""

    def spoil(file: Path) -> None:
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        said = json.loads(content[8:end])
        change(said)
        raw = json.dumps(said).encode()
        file.write_bytes(len(raw).to_bytes(8, "little") + raw + content[end:])

    return spoil


def offsets(begin: int, end: int) -> Spoil:
    """Of the tensor that lies first."""

    def change(said: dict[str, Any]) -> None:
        first = min((each for name, each in said.items() if name != "__metadata__"), key=lambda e: e["data_offsets"][0])
        first["data_offsets"] = [begin, end]

    return header(change)


def grown(said: dict[str, Any]) -> None:
    next(each for name, each in said.items() if name.endswith("weight"))["shape"][0] *= 2


def content(change: Callable[[bytes], bytes]) -> Spoil:
    def spoil(file: Path) -> None:
        file.write_bytes(change(file.read_bytes()))

    return spoil


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps(Payload(file.with_name("trace"))))


FILES: dict[str, Spoil] = {
    "cut short": content(lambda whole: whole[:-100]),
    "cut in its header": content(lambda whole: whole[:300]),
    "empty": content(lambda _: b""),
    "longer than it says": content(lambda whole: whole + b"1234"),
    "a header of exabytes": content(lambda whole: (1 << 60).to_bytes(8, "little") + whole[8:]),
    "no JSON": content(lambda whole: whole[:8] + b"[" + whole[9:]),
    "behind the file": offsets(1 << 40, (1 << 40) + 64),
    "backwards": offsets(4096, 64),
    "over another": offsets(64, 4096),
    "shapes for more": header(grown),
    "a pickle": pickled,
}
"""Of safetensors files; the error names the file."""


@pytest.mark.parametrize("spoil", FILES.values(), ids=FILES)
@pytest.mark.usefixtures("unread")
def test_a_file_that_is_not_what_it_says_is_named(folder: Path, spoil: Spoil) -> None:
    spoil(folder / SINGLE)
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        tiny_backend(folder)
    assert not (folder / "trace").exists()


@pytest.mark.parametrize("spoil", FILES.values(), ids=FILES)
def test_so_is_an_adapter_s(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, spoil: Spoil) -> None:
    base = make_model("llama", tmp_path / "base")
    write_adapter(base, tmp_path)
    spoil(tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        read_adapter(ModelName("a"), tmp_path, read_model_config(base.path), 16)
    assert not (tmp_path / "trace").exists()


@pytest.mark.usefixtures("unread")
def test_pickles_are_not_read(folder: Path) -> None:
    (folder / SINGLE).unlink()
    pickled(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only safetensors checkpoints can be read"):
        tiny_backend(folder)
    assert not (folder / "trace").exists()


def sharded(folder: Path, where: dict[str, str]) -> None:
    """Two files, and an index that says `where` some tensors are."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    files = {"model-1.safetensors": set(list(tensors)[::2]), "model-2.safetensors": set(list(tensors)[1::2])}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
    index = {name: file for file, names in files.items() for name in names} | where
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.usefixtures("unread")
def test_an_index_leads_to_files_that_are_there(folder: Path, tmp_path: Path) -> None:
    sharded(folder, {LAST: "model-3.safetensors"})
    with pytest.raises(ModelError, match=r"model-3\.safetensors: No such file"):
        tiny_backend(folder)
    shutil.copy(folder / "model-1.safetensors", tmp_path / "other.safetensors")
    for place in ("../other.safetensors", str(tmp_path / "other.safetensors")):
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][LAST] = place
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.raises(ModelError, match=f"weight_map: '{place}' lies outside of the model's directory"):
            tiny_backend(folder)
    (folder / INDEX).write_text("{")
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        tiny_backend(folder)


def change(folder: Path, of_name: Callable[[Tensor], Tensor | None], name: str = LAST) -> None:
    """Puts another tensor in the place of the last layer's; None: none."""
    tensors = load_file(folder / SINGLE)
    changed = of_name(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda _: None, f"the checkpoint has no tensor {LAST}"),
        (lambda weight: weight[1:], rf"tensor {LAST} has shape \[\d+, 64\], the config asks for \[\d+, 64\]"),
        (lambda weight: weight.to(torch.int8), f"tensor {LAST} has dtype int8; weights are one of .float32, bfloat16"),
        (lambda weight: weight.to(torch.float8_e4m3fn), f"tensor {LAST} has dtype float8_e4m3fn; weights are one of"),
    ],
    ids=["missing", "misshapen", "int8", "fp8"],
)
@pytest.mark.usefixtures("unread")
def test_a_tensor_of_the_last_layer_is_missed_before_the_first_is_read(
    folder: Path, spoil: Callable[[Tensor], Tensor | None], complaint: str
) -> None:
    change(folder, spoil)
    with pytest.raises(ModelError, match=complaint):
        tiny_backend(folder)


def test_floats_of_several_types_are_those_of_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values of one layer among them, which are joined to one matrix."""
    types = {"q_proj": torch.bfloat16, "k_proj": torch.float16, "norm": torch.float64, "o_proj": torch.bfloat16}
    tensors = load_file(folder / SINGLE)
    for name in tensors:
        dtype = next((each for part, each in types.items() if part in name), torch.float32)
        tensors[name] = tensors[name].to(dtype)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    recorded = record_logits(monkeypatch)
    driver = Driver(tiny_backend(folder, dtype="float32", ops="native"))
    recorded.clear()
    sequence = driver.add(prompt(40), OUTPUT)
    driver.run()
    expected = TinyModel("mixed", folder, reference).logits(sequence.tokens)[39:-1]
    assert torch.cat(recorded[:OUTPUT]).sub(expected).abs().max() < 1e-4 * expected.abs().max()
