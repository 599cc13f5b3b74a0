"""Checkpoints as programs that quantise write them, by their documented layouts, and what their tensors stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.models.rounded_models import SIZES
from tests.support.models.tiny_models import TinyModel, make_model

FP8 = torch.float8_e4m3fn

Written = tuple[dict[str, Tensor], Tensor]
"""A module's tensors, and the weight that they stand for."""


def words(codes: Tensor, bits: int) -> Tensor:
    """Along the last dimension, the lowest bits first."""
    if bits == 3:
        ones = (codes.long().unsqueeze(-1) >> torch.arange(3)) & 1
        return words(ones.flatten(-2), 1)
    grouped = codes.long().view(*codes.shape[:-1], -1, 32 // bits)
    packed = sum(grouped[..., i] << (bits * i) for i in range(32 // bits))
    assert isinstance(packed, Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def grouped(weight: Tensor, bits: int, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [out, in], scales and zeros [out, groups], and what they stand for. The last group may be smaller."""
    out, inputs = weight.shape
    if missing := -inputs % size:
        codes, scales, zeros, numbers = grouped(nn.functional.pad(weight, (0, missing)), bits, size)
        return codes[:, :inputs], scales, zeros, numbers[:, :inputs]
    groups = weight.view(out, inputs // size, size)
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low) / ((1 << bits) - 1)).half().float()
    zeros = (-low / scales).round().clamp(1, (1 << bits) - 1)
    codes = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, (1 << bits) - 1)
    numbers = ((codes - zeros[..., None]) * scales[..., None]).view(out, inputs)
    return codes.view(out, inputs).to(torch.uint8), scales, zeros.to(torch.uint8), numbers


def gptq(weight: Tensor, bits: int = 4, order: bool = False, less: int = 1, size: int = 32) -> Written:
    codes, scales, zeros, numbers = grouped(weight, bits, size)
    index = torch.arange(weight.shape[1], dtype=torch.int32) // size
    if order:
        shuffled = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
        codes, index, numbers = codes[:, shuffled], index[shuffled], numbers[:, shuffled]
    return {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words(zeros.T.contiguous() - less, bits),
        "scales": scales.T.contiguous().half(),
        "g_idx": index,
    }, numbers


def without_index(written: Written) -> Written:
    """As some write GPTQ's whose inputs are in their order."""
    tensors, numbers = written
    return {name: each for name, each in tensors.items() if name != "g_idx"}, numbers


def awq(weight: Tensor) -> Written:
    codes, scales, zeros, numbers = grouped(weight, 4, 64)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(each: Tensor) -> Tensor:
        return words(each.T.reshape(each.shape[1], -1, 8)[:, :, order].flatten(1), 4)

    return {"qweight": packed(codes), "qzeros": packed(zeros), "scales": scales.T.contiguous().half()}, numbers


def compressed(weight: Tensor, bits: int = 4, asymmetric: bool = False) -> Written:
    if asymmetric:
        codes, scales, zeros, numbers = grouped(weight, bits, 32)
        points = {"weight_zero_point": words(zeros.T.contiguous(), bits).T.contiguous()}
    else:
        size = 32 if bits == 4 else weight.shape[1]
        half = 1 << (bits - 1)
        groups = weight.view(len(weight), -1, size)
        scales = groups.abs().amax(2) / (half - 1)
        signed = (groups / scales[..., None]).round()
        numbers, codes = (signed * scales[..., None]).view(weight.shape), (signed + half).view(weight.shape)
        points = {}
    shape = torch.tensor(weight.shape)
    return {"weight_packed": words(codes, bits), "weight_scale": scales, "weight_shape": shape, **points}, numbers


def int8(weight: Tensor, name: str = "weight_scale", factor: float = 1.0) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round()
    return {"weight": codes.to(torch.int8), name: scales * factor}, codes * scales


def fp8(weight: Tensor, scales: Tensor, name: str = "weight_scale", block: int | None = None) -> Written:
    wide = scales if block is None else scales.repeat_interleave(block, 0).repeat_interleave(block, 1)
    wide = wide[: weight.shape[0], : weight.shape[1]] if block is not None else wide
    codes = (weight / wide).to(FP8)
    return {"weight": codes, name: scales}, codes.float() * wide


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of two numbers each, the first in the low bits, and what they stand for, by `scales` [out, groups]."""
    scaled = weight.view(*scales.shape, -1) / scales[..., None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    numbers = (E2M1[codes] * scaled.sign() * scales[..., None]).view(weight.shape)
    codes = (codes + 8 * (scaled < 0)).view(weight.shape)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), numbers


def nvfp4(weight: Tensor, modelopt: bool = False) -> Written:
    """Groups of 16 inputs, with scales in fp8; the greatest of all is 448."""
    greatest = weight.view(len(weight), -1, 16).abs().amax(2) / 6
    every = greatest.max() / 448
    scales = (greatest / every).to(FP8)
    packed, numbers = e2m1(weight, scales.float() * every)
    if modelopt:
        return {
            "weight": packed,
            "weight_scale": scales,
            "weight_scale_2": every,
            "input_scale": every.clone(),
        }, numbers
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": (1 / every).view(1)}, numbers


def mx(weight: Tensor, most: int = 6, name: str = "weight_packed") -> Written:
    """Groups of 32 inputs, with powers of two; `most`: the greatest of a number's format."""
    powers = (weight.view(len(weight), -1, 32).abs().amax(2) / most).log2().ceil()
    exponents, scales = (powers + 127).to(torch.uint8), powers.exp2()
    if most > 6:
        codes = (weight / scales.repeat_interleave(32, 1)).to(FP8)
        return {"weight": codes, "weight_scale": exponents}, codes.float() * scales.repeat_interleave(32, 1)
    packed, numbers = e2m1(weight, scales)
    return {name: packed, "weight_scale": exponents}, numbers


def blocks(weight: Tensor, block: int) -> Tensor:
    rows, columns = (-(-each // block) for each in weight.shape)
    padded = torch.zeros(rows * block, columns * block)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded.view(rows, block, columns, block).abs().amax((1, 3)) / 448


NF4 = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0]
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
FP4 = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
FP4 += [-each for each in FP4]


def four_bits(weight: Tensor, kind: str = "nf4", nested: bool = False) -> Written:
    """bitsandbytes' blocks of 64 elements in a row; `nested`: with their greatest in blocks of 256."""
    table, elements = torch.tensor(NF4 if kind == "nf4" else FP4), weight.reshape(-1, 64)
    greatest = elements.abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    written = {"weight.absmax": greatest, "weight.quant_map": table}
    if nested:
        known, offset = torch.linspace(-1, 1, 256), float(greatest.mean())
        scales = torch.stack([each.abs().max() for each in (greatest - offset).split(256)])
        wide = scales.repeat_interleave(256)[: len(greatest)]
        codes = ((greatest - offset)[:, None] / wide[:, None] - known).abs().argmin(1)
        greatest = known[codes] * wide + offset
        written |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": scales}
        written |= {"weight.nested_quant_map": known}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    places = (elements[..., None] / greatest[:, None, None] - table).abs().argmin(-1).flatten()
    packed = (places[0::2] << 4 | places[1::2]).to(torch.uint8).view(-1, 1)
    if kind == "fp4":  # as `bnb_4bit_quant_storage` may say
        packed = packed.flatten().view(torch.bfloat16).view(-1, 1)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    numbers = (table[places].view(-1, 64) * greatest[:, None]).view(weight.shape)
    return written | {"weight": packed, f"weight.quant_state.bitsandbytes__{kind}": text}, numbers


def modelopt_blocks(weight: Tensor) -> Written:
    tensors, numbers = fp8(weight, blocks(weight, 128), block=128)
    return tensors | {"weight_scale": tensors["weight_scale"][:, None, :, None]}, numbers


def quark(dtype: str, scheme: str, rows: dict[str, Any] | None = None) -> dict[str, Any]:
    weight = {"dtype": dtype, "qscheme": scheme, "symmetric": True, "is_dynamic": False}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": rows},
        "layer_quant_config": {"lm_head": {"weight": None}},
    }


def quark_int8(weight: Tensor) -> Written:
    """Its symmetric weights have zero points."""
    tensors, numbers = int8(weight)
    scales = tensors["weight_scale"].flatten()
    return tensors | {"weight_scale": scales, "weight_zero_point": torch.zeros(len(scales), dtype=torch.int8)}, numbers


def torchao(kind: str) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}, "_version": 2}}}


def torchao_bytes(written: Written) -> Written:
    tensors, numbers = written
    return {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale"]}, numbers


def torchao_int4(weight: Tensor) -> Written:
    """Groups of 32 inputs, counted from their middle."""
    groups = weight.view(len(weight), -1, 32)
    low, scales = groups.amin(2), (groups.amax(2) - groups.amin(2)) / 15
    signed = ((groups - low[..., None]) / scales[..., None]).round() - 8
    middle = low + 8 * scales
    numbers = (signed * scales[..., None] + middle[..., None]).view(weight.shape)
    codes = signed.view(weight.shape).to(torch.int8)
    packed = (codes[:, 0::2] & 15) | (codes[:, 1::2] << 4)
    return {"_weight_qdata": packed, "_weight_scale": scales.T, "_weight_zero_point": middle.T}, numbers


def hqq(weight: Tensor, bits: int = 4, transposed: bool = False) -> Written:
    """Groups of 64 elements in a row, with zero points between codes; `transposed`: groups of one column each."""
    groups = weight.reshape(64, -1).T if transposed else weight.reshape(-1, 64)
    low = groups.amin(1, keepdim=True)
    scales = (groups.amax(1, keepdim=True) - low) / ((1 << bits) - 1)
    zeros = -low / scales
    codes = (groups / scales + zeros).round().clamp(0, (1 << bits) - 1)
    tensors, numbers = [codes.to(torch.uint8), scales, zeros], (codes - zeros) * scales
    if transposed:
        tensors, numbers = [each.T for each in tensors], numbers.T
    codes, half = tensors[0], len(tensors[0]) // 2
    packed = codes[:half] << 4 | codes[half:] if bits == 4 else codes
    written = {"W_q": packed, "scale": tensors[1], "zero": tensors[2], "nbits": torch.tensor(bits)}
    return written, numbers.reshape(weight.shape)


def compressed_config(bits: int, kind: str, strategy: str, layout: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, "ignore": ["lm_head"]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
PACKED = compressed_config(4, "int", "group", "pack-quantized")
METHODS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Written]]] = {
    "gptq": (GPTQ, gptq),
    "gptq of eight bits": ({**GPTQ, "bits": 8}, lambda weight: gptq(weight, 8)),
    "gptq of two bits": ({**GPTQ, "bits": 2}, lambda weight: gptq(weight, 2)),
    "gptq of three bits": ({**GPTQ, "bits": 3}, lambda weight: gptq(weight, 3)),
    "gptq in another order": ({**GPTQ, "desc_act": True}, lambda weight: gptq(weight, order=True)),
    "gptq whose last groups are smaller": (
        {**GPTQ, "group_size": 48},
        lambda weight: without_index(gptq(weight, size=48)),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq),
    "packed": (PACKED, compressed),
    "packed with zero points": (PACKED, lambda weight: compressed(weight, asymmetric=True)),
    "packed bytes": (compressed_config(8, "int", "channel", "pack-quantized"), lambda weight: compressed(weight, 8)),
    "int8": (compressed_config(8, "int", "channel", "int-quantized"), int8),
    "fp8 of outputs": (
        compressed_config(8, "float", "channel", "float-quantized"),
        lambda weight: fp8(weight, weight.abs().amax(1, keepdim=True) / 448),
    ),
    "fp8": ({"quant_method": "fp8"}, lambda weight: fp8(weight, (weight.abs().max() / 448).view(1))),
    "fp8 of blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 48]},
        lambda weight: fp8(weight, blocks(weight, 48), "weight_scale_inv", 48),
    ),
    "fp8 of whole blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        lambda weight: fp8(weight, blocks(weight, 32), "weight_scale_inv", 32),
    ),
    "nvfp4": (
        compressed_config(4, "float", "tensor_group", "nvfp4-pack-quantized"),
        nvfp4,
    ),
    "mxfp4": (compressed_config(4, "float", "group", "mxfp4-pack-quantized"), mx),
    "mxfp8": (compressed_config(8, "float", "group", "mxfp8-quantized"), lambda weight: mx(weight, 448)),
    "modelopt's nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda weight: nvfp4(weight, modelopt=True),
    ),
    "modelopt's fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda weight: fp8(weight, weight.abs().max() / 448),
    ),
    "modelopt's fp8 of blocks": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
        modelopt_blocks,
    ),
    "auto-round": ({"quant_method": "auto-round", "bits": 4}, gptq),
    "auto-round as gptq's second": (
        {"quant_method": "intel/auto-round", "bits": 8, "packing_format": "auto_round"},
        lambda weight: gptq(weight, 8, less=0),
    ),
    "auto-round as awq": ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}, awq),
    "auto-round's nvfp4": (
        {"quant_method": "auto-round", "bits": 4, "data_type": "nv_fp", "packing_format": "auto_round:llm_compressor"},
        nvfp4,
    ),
    "fbgemm_fp8": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        lambda weight: fp8(weight, weight.abs().amax(1, keepdim=True) / 448),
    ),
    "quark's fp8": (quark("fp8_e4m3", "per_tensor"), lambda weight: fp8(weight, weight.abs().max() / 448)),
    "quark's int8": (quark("int8", "per_channel"), quark_int8),
    "quark's mxfp4": (quark("fp4", "per_group"), lambda weight: mx(weight, name="weight")),
    "torchao's fp8": (
        torchao("Float8WeightOnlyConfig"),
        lambda weight: torchao_bytes(fp8(weight, weight.abs().amax(1, keepdim=True) / 448)),
    ),
    "torchao's int8": (torchao("Int8WeightOnlyConfig"), lambda weight: torchao_bytes(int8(weight))),
    "torchao's int4": (torchao("Int4WeightOnlyConfig"), torchao_int4),
    "hqq": ({"quant_method": "hqq"}, hqq),
    "hqq of eight bits": ({"quant_method": "hqq"}, lambda weight: hqq(weight, 8)),
    "hqq of columns": ({"quant_method": "hqq"}, lambda weight: hqq(weight, transposed=True)),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, four_bits),
    "nested nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda weight: four_bits(weight, nested=True),
    ),
    "fp4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda weight: four_bits(weight, "fp4")),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        lambda weight: int8(weight, "SCB", 127.0),
    ),
}


LEFT_ALONE = (
    *("lm_head", "layers.1.self_attn.o_proj"),
    *("shared_expert_gate", "in_proj_ba", "in_proj_a", "in_proj_b"),
    *("linear_attn.a_proj", "linear_attn.b_proj", "self_attn.b_proj"),
    *(".attention.b_proj", "layers.1.attention.g_proj", "layers.1.attention.dense"),
)
"""Few outputs of delta nets are no blocks of 128, and eight codes of outputs are a word."""


def quantised(path: Path, method: str, family: str = "qwen2", **changes: Any) -> TinyModel:
    """A checkpoint of `method`, and a reference with what its weights stand for. The head, one layer's output
    projection, and what has few outputs are left alone."""
    return quantise(make_model(family, path, **SIZES, **changes), method)


def quantise(model: TinyModel, method: str, part: str = "") -> TinyModel:
    """The same, with its checkpoint as `quantised` has it. `part`: of the names of what is not left alone."""
    settings, write = METHODS[method]
    path = model.path
    tensors = load_file(path / "model.safetensors")
    with torch.no_grad():
        for module_name, module in model.reference.named_modules():
            name = _stored_name(module_name, tensors)
            if isinstance(module, nn.Linear) and part in module_name and not name.endswith(LEFT_ALONE):
                own, numbers = write(module.weight.float())
                if "shared_transformer" not in name or f"{name}.weight" in tensors:  # the first of those that share it
                    del tensors[f"{name}.weight"]
                    tensors |= {f"{name}.{key}": tensor.contiguous() for key, tensor in own.items()}
                module.weight = nn.Parameter(numbers)
            elif name.endswith(".experts"):
                for together in ("input_linear", "output_linear"):  # Granite's
                    tensors.pop(f"{name.removesuffix('experts')}{together}.weight", None)
                for expert, part, weight in _expert_weights(module, f"{name}.0.w1.weight" in tensors):
                    own, numbers = write(weight.detach().float().clone())
                    tensors.pop(f"{name}.{expert}.{part}.weight", None)
                    tensors |= {f"{name}.{expert}.{part}.{key}": each.contiguous() for key, each in own.items()}
                    weight.copy_(numbers)
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return model


def _stored_name(module: str, tensors: dict[str, Tensor]) -> str:
    """What a module of the library is called in its checkpoint: Nemotron-H's, Kimi-Linear's and Ling 3's differ,
    and the experts of Mixtral and MiniMax, and those of a model with images."""
    if "language_model.model.norm.weight" in tensors:
        return module.replace("model.language_model.", "language_model.model.", 1)
    if any(".attention.f_proj." in name for name in tensors):
        return re.sub(r"self_attn(\.forget_gate)?", "attention", module).replace(".o_proj", ".dense")
    if any(".self_attn.f_a_proj." in name for name in tensors):
        return module.replace(".forget_gate.", ".").replace(".mlp.", ".block_sparse_moe.")
    if "model.layers.0.block_sparse_moe.gate.weight" in tensors:
        return module.replace(".mlp", ".block_sparse_moe", 1)
    if any(".self_attn.gate_proj." in name for name in tensors):  # LFM3's gates of heads
        return module.replace(".g_proj", ".gate_proj")
    return module.replace("model.", "backbone.", 1) if "backbone.embeddings.weight" in tensors else module


def _expert_weights(experts: nn.Module, numbered: bool) -> Iterator[tuple[int, str, Tensor]]:
    """Each expert's matrices with their names in a checkpoint; `numbered`: LFM2's names. Nemotron-H has no gates."""
    gate, up, down = ("w1", "w3", "w2") if numbered else ("gate_proj", "up_proj", "down_proj")
    for name, parameter in experts.named_parameters():
        for expert, weight in enumerate(parameter):
            if name == "gate_up_proj":
                yield from zip((expert, expert), (gate, up), weight.chunk(2), strict=True)
            else:
                yield expert, {"up_proj": up, "down_proj": down}[name], weight
