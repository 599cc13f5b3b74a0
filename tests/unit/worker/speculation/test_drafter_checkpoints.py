"""Drafters' checkpoints are read in every layout in which they are published, and mean the same in each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker.batch.rows import RowRuns, rows_of
from services.worker.batch.sequences import SequenceTable
from services.worker.batch.staging import rows_on_device
from services.worker.models.config import ModelError
from services.worker.models.dummy_weights import DummyTensors
from services.worker.models.hf_config import read_model_config
from services.worker.ops.interface import BatchMeta
from services.worker.speculation.choice import open_drafter
from services.worker.speculation.drafter import TargetModel
from services.worker.speculation.proposer import ComputedStep, DraftRequest
from services.worker.speculation.settings import Method, SpeculationSettings
from shared.blocks import DEFAULT_BLOCK_SIZE as BLOCK_SIZE
from shared.ids import SequenceId
from shared.messages.worker import NewSequence, SequenceWork
from shared.packing import pack
from tests.support.models.tiny_drafters import by_vllms_names, eagle_tensors, medusa_tensors
from tests.support.models.tiny_models import POSITIONS, VOCABULARY, TinyModel, make_model
from tests.support.worker.plan_driver import GREEDY
from tests.support.worker.tiny_backend import tiny_backend

Tensors = dict[str, Tensor]
Layout = Callable[[Tensors, Path], None]
PROMPT = [5, 9, 33, 70, 5, 9, 41, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def target(model: TinyModel) -> TargetModel:
    decoder = tiny_backend(model.path).rank.decoder
    config = read_model_config(model.path)
    return TargetModel(model.path, config, decoder, decoder.ops, torch.device("cpu"), torch.float32, POSITIONS, 1)


def drafted(target: TargetModel, method: Method, folder: Path) -> list[int]:
    """What is drafted behind PROMPT, of which the model's features are made up."""
    drafter = open_drafter(SpeculationSettings(method=method, num_speculative_tokens=3, model=str(folder)), target)
    with torch.inference_mode():
        table = SequenceTable(
            max_sequences=1, max_model_len=64, num_blocks=4, vocab_size=VOCABULARY, block_size=BLOCK_SIZE
        )
        new = NewSequence(
            sequence=SequenceId(0),
            tokens=pack(PROMPT),
            prompt_length=len(PROMPT),
            computed=0,
            blocks=pack([2]),
            sampling=GREEDY,
        )
        table.add(new)
        table.scheduled((SequenceWork(SequenceId(0), len(PROMPT) - 1, b"", False),))
        proposer = drafter.proposer(4, 1)
        taps = 3 if method == "eagle3" else 1
        proposer.observe(seen(table, taps * target.config.hidden_size))
        drafts = proposer.propose(DraftRequest(np.array([0]), np.array([3], dtype=np.int32), table))
    assert drafts.counts.tolist() == [3]
    return drafts.tokens[0].tolist()


def test_dummy_weights_of_ranks_are_made_up_anew(model: TinyModel, target: TargetModel) -> None:
    """Nothing is read of a model that may have no checkpoint."""
    several = replace(target, folder=model.path / "none", ranks=2, dummy=True)
    embedding, _ = several.embedding_and_head()
    config = target.native_config
    own = DummyTensors(torch.float32, torch.device("cpu")).read(
        "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    )
    assert isinstance(embedding, Tensor)
    assert torch.equal(embedding, own)


def made_up_features(hidden: int) -> Tensor:
    """Of all tokens of PROMPT but the last one."""
    return torch.randn(len(PROMPT) - 1, hidden, generator=torch.Generator().manual_seed(3))


def seen(table: SequenceTable, hidden: int) -> ComputedStep:
    """A step that computed all of PROMPT but its last token, which it drew."""
    count = len(PROMPT) - 1
    zeros = np.zeros(1, dtype=np.intp)
    units = RowRuns(zeros, zeros, np.zeros(1, dtype=np.int32), np.array([count], dtype=np.int32))
    rows = rows_of(units, table.block_tables, table.tokens, BLOCK_SIZE)
    meta: BatchMeta = rows_on_device(rows, rows.last_rows, torch.device("cpu"))[1]
    return ComputedStep(
        seq_indices=rows.seq_indices,
        positions=rows.positions,
        kv_slots=rows.kv_slots,
        meta=meta,
        features=made_up_features(hidden),
        sampled_indices=zeros,
        last_rows=rows.last_rows,
        following=lambda: torch.tensor(PROMPT[1:], dtype=torch.int32),
    )


def safetensors(name: str) -> Layout:
    return lambda tensors, folder: save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()}, folder / name
    )


def pickled(name: str) -> Layout:
    return lambda tensors, folder: torch.save(tensors, folder / name)


def sharded(tensors: Tensors, folder: Path) -> None:
    """Two files and an index, as larger checkpoints come."""
    names = sorted(tensors)
    files = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name].contiguous() for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def prefixed(prefix: str, layout: Layout) -> Layout:
    return lambda tensors, folder: layout({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, folder)


def vllms(layout: Layout) -> Layout:
    return lambda tensors, folder: layout(by_vllms_names(tensors), folder)


MEDUSA: dict[str, Layout] = {
    "medusa_lm_head.safetensors": safetensors("medusa_lm_head.safetensors"),
    "medusa_lm_head.pt": pickled("medusa_lm_head.pt"),
    "pytorch_model.bin": pickled("pytorch_model.bin"),
    "model.safetensors, medusa_head.": prefixed("medusa_head.", safetensors("model.safetensors")),
    "model.safetensors, medusa_heads.": prefixed("medusa_heads.", safetensors("model.safetensors")),
    "vLLM's names": vllms(safetensors("model.safetensors")),
    "vLLM's names, pytorch_model.bin": vllms(pickled("pytorch_model.bin")),
    "sharded": sharded,
}
EAGLE: dict[str, Layout] = {
    "model.safetensors": safetensors("model.safetensors"),
    "pytorch_model.bin": pickled("pytorch_model.bin"),
    "model. before all names": prefixed("model.", safetensors("model.safetensors")),
    "sharded": sharded,
}


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_medusa_heads_mean_the_same_in_every_layout(
    model: TinyModel, target: TargetModel, tmp_path: Path, layers: int
) -> None:
    tensors = medusa_tensors(model, layers=layers)
    drafts = {}
    for number, (name, layout) in enumerate(MEDUSA.items()):
        (folder := tmp_path / str(number)).mkdir()
        layout(tensors, folder)
        drafts[name] = drafted(target, "medusa", folder)
    first = next(iter(drafts.values()))
    assert drafts == dict.fromkeys(drafts, first)
    assert first == by_the_paper(tensors, layers)


def by_the_paper(tensors: Tensors, layers: int) -> list[int]:
    """Each head's favourite behind the last of the made-up features."""
    hidden = tensors["0.0.weight" if not layers else "0.0.linear.weight"].shape[1]
    feature = made_up_features(hidden)[-1]
    tokens = []
    for head in range(3):
        x = feature
        for layer in range(layers):
            linear = tensors[f"{head}.{layer}.linear.weight"] @ x + tensors[f"{head}.{layer}.linear.bias"]
            x = x + torch.nn.functional.silu(linear)
        tokens.append(int((tensors[f"{head}.{layers}.weight"] @ x).argmax()))
    return tokens


@pytest.mark.parametrize("normed", [False, True], ids=["as EAGLE-1", "with an input norm"])
@pytest.mark.parametrize("biased", [False, True], ids=["fc", "fc with bias"])
def test_an_eagle_layer_means_the_same_in_every_layout(
    model: TinyModel, target: TargetModel, tmp_path: Path, normed: bool, biased: bool
) -> None:
    tensors = eagle_tensors(model)
    hidden = target.config.hidden_size
    if normed:
        tensors["layers.0.input_layernorm.weight"] = torch.rand(hidden) + 0.5
    if biased:
        tensors["fc.bias"] = torch.randn(hidden)
    tensors["embed_tokens.weight"] = torch.zeros(VOCABULARY, hidden)  # some hold the model's; it is read from there
    drafts = {}
    for number, (name, layout) in enumerate(EAGLE.items()):
        (folder := tmp_path / str(number)).mkdir()
        layout(tensors, folder)
        eagle_config(model, folder)
        drafts[name] = drafted(target, "eagle", folder)
    assert drafts == dict.fromkeys(drafts, next(iter(drafts.values())))


def test_an_eagle_layer_is_llamas_whatever_the_model_is(tmp_path: Path) -> None:
    """Gemma has other norms, and another one of a name that Llama has, too."""
    gemma = make_model("gemma2", tmp_path / "gemma")
    tensors = {name: each for name, each in eagle_tensors(gemma).items() if "feedforward" not in name}
    (tmp_path / "head").mkdir()
    save_file(tensors, tmp_path / "head" / "model.safetensors")
    own = json.loads((gemma.path / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(own | {"num_hidden_layers": 1}))
    decoder = tiny_backend(gemma.path).rank.decoder
    config = read_model_config(gemma.path)
    how = (decoder.ops, torch.device("cpu"), torch.float32, POSITIONS, 1)
    assert len(drafted(TargetModel(gemma.path, config, decoder, *how), "eagle", tmp_path / "head")) == 3


def test_the_norm_and_the_bias_of_an_eagle_layer_count(model: TinyModel, target: TargetModel, tmp_path: Path) -> None:
    hidden, drafts = target.config.hidden_size, set()
    more: list[Tensors] = [
        {},
        {"layers.0.input_layernorm.weight": torch.full((hidden,), 3.0)},
        {"fc.bias": torch.linspace(-9, 9, hidden)},
    ]
    for number, extra in enumerate(more):
        (folder := tmp_path / str(number)).mkdir()
        safetensors("model.safetensors")(eagle_tensors(model) | extra, folder)
        eagle_config(model, folder)
        drafts.add(tuple(drafted(target, "eagle", folder)))
    assert len(drafts) == 3


def eagle_config(model: TinyModel, folder: Path, **different: object) -> None:
    own = json.loads((model.path / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | {"num_hidden_layers": 1} | different))


def test_what_is_wrong_with_a_checkpoint_is_said(model: TinyModel, target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no weights: model\.safetensors, .*medusa_lm_head\.pt is expected"):
        drafted(target, "medusa", tmp_path)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"not a pickle")
    with pytest.raises(ModelError, match=r"medusa_lm_head.pt cannot be read"):
        drafted(target, "medusa", tmp_path)
    pickled("medusa_lm_head.pt")(medusa_tensors(model, heads=2), tmp_path)
    with pytest.raises(ModelError, match="has 2 Medusa heads, num_speculative_tokens asks for 3"):
        drafted(target, "medusa", tmp_path)
    tensors = medusa_tensors(model)
    tensors["1.0.linear.weight"] = torch.zeros(3, 3)
    pickled("medusa_lm_head.pt")(tensors, tmp_path)
    with pytest.raises(ModelError, match=r"1\.0\.linear\.weight.*\[3, 3\]"):
        drafted(target, "medusa", tmp_path)


def test_what_is_wrong_with_an_eagle_layer_is_said(model: TinyModel, target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        drafted(target, "eagle", tmp_path)
    eagle_config(model, tmp_path, hidden_size=12)
    with pytest.raises(ModelError, match="hidden_size is 12, the model's is 48"):
        drafted(target, "eagle", tmp_path)
    eagle_config(model, tmp_path)
    tensors = eagle_tensors(model)
    del tensors["fc.weight"]
    safetensors("model.safetensors")(tensors, tmp_path)
    with pytest.raises(ModelError, match=r"no tensor fc\.weight"):
        drafted(target, "eagle", tmp_path)
