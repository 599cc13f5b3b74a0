"""Files of llama.cpp (GGUF) as models, against `transformers` with the numbers that llama.cpp's package reads there."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from deploy.errors import CommandError
from deploy.model_choice import model_directory, served_name
from services.scheduler.core.limits import EngineLimits
from services.worker.models.checkpoint import open_checkpoint
from services.worker.models.config import ModelError
from services.worker.models.gguf.conversion import convert
from services.worker.models.gguf.gguf_codes import read_codes
from services.worker.models.quantization.method import read_method
from services.worker.models.quantization.quantized_checkpoint import QuantizedCheckpoint
from services.worker.ops.quantized import Code, QuantizedWeight
from services.worker.speculation.settings import Method, SpeculationSettings
from tests.support.models.gguf_files import Q4_K_M, Kinds, gguf_model, put_floats
from tests.support.models.tiny_drafters import make_eagle, make_eagle3
from tests.support.models.tiny_tokenizers import TEXT, byte_level
from tests.support.worker.rank_processes import rank_processes
from tests.support.worker.recorded_logits import assert_logits_agree, record_logits
from tests.support.worker.tiny_backend import tiny_backend

PROMPT = [3 + 7 * i % 600 for i in range(40)]
OUTPUT = 5
OUTPUT_OF_DRAFTS = 40
LLAMA_3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}


def converted(file: Path) -> Path:
    """In this process: another one has PyTorch to import first."""
    folder = file.with_suffix("")
    convert(file, folder)
    return folder


@pytest.mark.parametrize(
    ("family", "kind", "changes"),
    [
        ("llama", Kind.Q8_0, {}),
        ("llama", Kind.Q4_0, LLAMA_3),
        ("qwen2", Kind.Q8_0, {}),
        ("qwen3", Kind.Q4_K, {}),
        ("llama", Kind.Q5_K, {}),
        ("llama", Q4_K_M, {}),
        ("qwen3", {"": Kind.Q3_K, "ffn": Kind.Q2_K, "attn_v": Kind.Q5_0, "embd": Kind.IQ4_XS}, {}),
        ("qwen2", {"": Kind.Q4_K, "token_embd": Kind.Q6_K}, {"tie_word_embeddings": True}),
        ("qwen2", Kind.F16, {}),
    ],
    ids=[
        "llama-q8_0",
        "llama3-q4_0",
        "qwen2-q8_0",
        "qwen3-q4_k",
        "llama-q5_k",
        "llama-q4_k_m",
        "qwen3-mixed",
        "qwen2-tied",
        "qwen2-f16",
    ],
)
def test_logits_are_those_of_the_numbers(
    family: str, kind: Kinds, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = gguf_model(family, tmp_path, kind, byte_level(), **changes)
    folder = converted(file)
    recorded = record_logits(monkeypatch)
    backend = tiny_backend(folder, ops="native", dtype="float32")
    assert_logits_agree(backend, model, PROMPT, OUTPUT, recorded)


@pytest.mark.features("quantization", "tensor parallel", "speculative")
def test_ranks_have_shares_of_a_table_of_codes_and_draft_with_the_whole(tmp_path: Path) -> None:
    """Which is embedding and head; who drafts with several ranks reads both anew."""
    kinds: Kinds = {"": Kind.Q4_K, "token_embd": Kind.Q6_K}
    model, file = gguf_model("qwen2", tmp_path, kinds, byte_level(), tie_word_embeddings=True)
    folder, limits = converted(file), EngineLimits(run_ahead=1, speculation="fixed")
    heads: dict[Method, Path] = {
        "eagle": make_eagle(model, tmp_path / "eagle"),
        "eagle3": make_eagle3(model, tmp_path / "eagle3"),
    }
    prompts = [[7 * i + first for i in range(20)] for first in range(4)]  # after which the model repeats itself
    expected = [model.greedy(prompt, OUTPUT_OF_DRAFTS) for prompt in prompts]
    with rank_processes(2, tmp_path) as ranks:
        for method, head in heads.items():
            speculation = SpeculationSettings(method=method, model=str(head))
            accepted = []
            for tp in (1, 2):
                engine = ranks.serve(folder, tp=tp, ops="native", limits=limits, speculation=speculation)
                requests = [engine.ask(prompt, OUTPUT_OF_DRAFTS) for prompt in prompts]
                engine.run()
                assert [request.tokens for request in requests] == expected
                accepted.append(engine.accepted)
            assert accepted[0] == accepted[1]
            assert accepted[0] > 0 or method != "eagle"
        engine = ranks.serve(folder, tp=2, ops="native")
        request = engine.ask(PROMPT, OUTPUT)
        engine.run()
        expected = model.logits(PROMPT + request.tokens)[len(PROMPT) - 1 : -1]
        assert torch.tensor(engine.logits).sub(expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Kind.Q4_0, "int4"),
        (Kind.Q4_1, "int4"),
        (Kind.Q5_0, "int8"),
        (Kind.Q5_1, "int8"),
        (Kind.Q8_0, "int8"),
        (Kind.Q4_K, "int4"),
        (Kind.Q5_K, "int8"),
        (Kind.Q6_K, "int8"),
        (Kind.Q3_K, "int4"),
        (Kind.Q2_K, "int4"),
        (Kind.IQ4_NL, "int8"),
        (Kind.IQ4_XS, "int8"),
        (Kind.MXFP4, "int8"),
        (Kind.IQ3_S, None),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_codes_stand_for_what_llama_cpps_package_makes_of_them(kind: Kind, code: Code | None) -> None:
    """Random blocks: every bit counts."""
    inputs, size = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (6, 512 // inputs, size), dtype=np.uint8)
    put_floats(blocks, kind)
    read = read_codes(int(kind), torch.from_numpy(blocks.reshape(-1)), (6, 512))
    assert (code is None) == (read is None)
    if read is None or code is None:
        return
    codes = read.codes if code == "int4" else read.codes ^ 128
    weight = QuantizedWeight(code, codes, read.scales.float(), offsets=read.offsets)
    expected = torch.from_numpy(gguf.dequantize(blocks.reshape(6, -1), kind))
    torch.testing.assert_close(weight.dequantized(torch.float32), expected, rtol=1e-6, atol=1e-7)


def test_codes_stay_codes_and_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = tmp_path / "cache" / "baton" / "gguf"
    _, file = gguf_model("llama", tmp_path, {"": Kind.Q8_0, "attn_k": Kind.IQ3_S}, byte_level())
    folder = model_directory(str(file))
    assert capsys.readouterr().err.endswith(f"{file}: matrices of IQ3_S become bfloat16, 16 bits a weight\n")
    assert (folder.parent, served_name(str(file), None)) == (cache, "llama")
    assert [each.name for each in cache.iterdir()] == [folder.name]
    made = (folder / "config.json").stat()
    assert model_directory(str(file)) == folder
    assert (folder / "config.json").stat() == made
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CommandError, match=r"llama\.gguf: cut short"):
        model_directory(str(file))
    assert [each.name for each in cache.iterdir()] == [folder.name]
    method = read_method(folder)
    assert method is not None
    with open_checkpoint(folder, torch.float32) as checkpoint:
        tensors = QuantizedCheckpoint(checkpoint, method, torch.float32)
        down = tensors.read_linear("model.layers.0.mlp.down_proj", (256, 256))
    assert isinstance(down, QuantizedWeight)
    assert (down.code, down.group_size) == ("int8", 32)


def test_its_tokenizer_is_the_one_that_was_written(tmp_path: Path) -> None:
    _, file = gguf_model("qwen2", tmp_path, Kind.F16, byte_level())
    folder = converted(file)
    made, original = Tokenizer.from_file(str(folder / "tokenizer.json")), byte_level()
    text = f"{TEXT.replace('好', '')}<|im_start|>user\n<tool> 1234"  # but for an added token that no letters spell
    assert made.encode(text).ids == original.encode(text).ids
    assert made.decode(original.encode(text).ids) == text.replace("<|im_start|>", "")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["chat_template"][:6]) == ("</s>", "{% for")
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [original.token_to_id("</s>"), original.token_to_id("<|im_end|>")]


def said(whole: bytes, shape: tuple[int, int] = (256, 256), offset: int | None = None) -> bytes:
    """The file's first matrix of queries has another shape, inputs first, or lies elsewhere."""
    name = b"blk.0.attn_q.weight"
    at = whole.index(name) + len(name) + 4
    where = whole[at + 20 : at + 28] if offset is None else offset.to_bytes(8, "little")
    return b"".join(
        (whole[:at], *(size.to_bytes(8, "little") for size in shape), whole[at + 16 : at + 20], where, whole[at + 28 :])
    )


def test_what_cannot_be_read_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    _, file = gguf_model("qwen2", tmp_path, Kind.Q8_0, byte_level())
    whole = file.read_bytes()
    mamba, _ = gguf_model("llama", tmp_path / "other", Kind.F16, byte_level(), architecture="mamba")
    for content, complaint in (
        (whole[:-100_000], "cut short: its tensors end at byte"),
        (whole[:3000], "no GGUF file that can be read"),
        (b"{}" * 100, "no GGUF file that can be read: .* GGUF magic bytes"),
        (pickle.dumps({"a": 1}) * 100, "no GGUF file that can be read: .* GGUF magic bytes"),
        (
            said(whole, shape=(1 << 50, 256)),
            r"tensor blk.0.attn_q.weight has shape \[256, 1125899906842624\]; sizes from",
        ),
        (said(whole, shape=(1 << 30, 256)), "cut short: its tensors end at byte"),
        (said(whole, shape=(257, 255)), "tensor blk.0.attn_q.weight: "),
        (said(whole, offset=1 << 40), "cut short: its tensors end at byte"),
        (whole.replace(b"</s>", b"\xff/s>"), "no tokenizer can be made of it"),
        (whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn\n_.weight"), r"tensor 'blk.0.attn\\n_.weight': a name of"),
        (whole.replace(b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"), "tensor blk.0.attn_x.weight is not known"),
        (
            whole.replace(b"ggml.tokens", b"ggml.tokenz"),
            "tokenizer.ggml.tokens None tokens; a row for each",
        ),
        (whole.replace(b"qwen2.block_count", b"qwen2.block_cound"), "qwen2.block_count: one number is expected"),
        ((mamba.path.parent / "llama.gguf").read_bytes(), "architecture 'mamba'; supported: llama, qwen2, qwen3"),
    ):
        file.write_bytes(content)
        with pytest.raises(ModelError, match=complaint):
            convert(file, tmp_path / "made")
    assert not list(tmp_path.glob("made*"))
