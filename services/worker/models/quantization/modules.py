"""One linear layer's codes, read from the tensors of its method.

Layouts, [out, in] being a weight's shape and G its groups of inputs:

compressed-tensors: `weight_packed` int32 [out, in * bits / 32] of unsigned codes with `weight_scale` [out, G] and,
where asymmetric, `weight_zero_point` int32 [out * bits / 32, G]; or `weight` int8 or float8_e4m3fn with `weight_scale`
[out, 1], [1], or one for each block. Directories made of GGUF files may have `weight_offset` float32 [out, G], too,
which is added to scaled numbers.
Of four bits (e2m1) `weight_packed` uint8 [out, in / 2], the first of two inputs in the low bits, with `weight_scale`
[out, G], float8_e4m3fn that `weight_global_scale` [1] divides (NVFP4) or uint8 exponents of two plus 127 (MXFP4).
modelopt: `weight` float8_e4m3fn with `weight_scale` [], [out], [out / 128, 1, in / 128, 1], or uint8 exponents [out, G]
(MXFP8); or e2m1 as above with `weight_scale` float8_e4m3fn [out, G] times `weight_scale_2` [] (NVFP4).
quark: as modelopt, and `weight` int8 with `weight_scale` [] or [out].
gptq: `qweight` int32 [in * bits / 32, out], `scales` [G, out], `qzeros` int32 [G, out * bits / 32]; maybe `g_idx` [in].
Of 2 and 3 bits, too.
awq: `qweight` int32 [in, out / 8], `scales` [G, out], `qzeros` int32 [G, out / 8].
torchao: `_weight_qdata` int8 or float8_e4m3fn with `_weight_scale` [out, G] or [1, 1]; or of two inputs in a byte, the
first in the low bits, in two's complement, with `_weight_scale` and `_weight_zero_point` [G, out], which is added to
scaled numbers.
hqq: `W_q` uint8 of [out * in / size, size] codes, or of four bits of [out * in / size / 2, size], the first half of the
rows in the high bits, with `scale` and `zero` [out * in / size, 1], the latter in codes; or all of these transposed.
fp8, fbgemm_fp8: `weight` float8_e4m3fn with `weight_scale` [] or [out, 1], or `weight_scale_inv` [out / block,
in / block], numbers or uint8 exponents; or e2m1 as int8 [out, in / 2] with `weight_scale_inv` exponents [out, in / 32].
bitsandbytes: `weight` int8 with `SCB` [out], the greatest of each output. Of four bits `weight` uint8
[out * in / 2, 1] (or these bytes in another type), the first of two elements in the high bits, whose numbers are in
`weight.quant_map` [16], times the greatest of its block of elements in `weight.absmax`: float32, or uint8 whose numbers
are in `weight.nested_quant_map` [256], times `weight.nested_absmax` of a block of those, plus an offset. Sizes of
blocks and the offset are JSON in `weight.quant_state.bitsandbytes__nf4` (or `fp4`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.quantization.method import GPTQ_BITS, QuantizationMethod
from services.worker.models.quantization.packing import (
    powers_of_two,
    unpack_awq,
    unpack_columns,
    unpack_e2m1,
    unpack_rows,
)
from services.worker.ops.quantized import GROUP_SIZES, Code, QuantizedWeight

_FP8 = torch.float8_e4m3fn
_SCALED_INPUTS = "weights whose inputs are scaled are not supported"
_SIGNED = 128
"""What unsigned codes of eight bits stand for 0 by."""


CODES = (
    *(".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".W_q", ".SCB", "._weight_qdata"),
    ".weight.quant_map",
)
"""Ends of the names of tensors that only modules of codes have."""


def module_of(name: str) -> str:
    """The module that the tensor `name` is of."""
    before, found, _ = name.partition(".weight.")  # of bitsandbytes, whose names may have more dots
    return before if found else name.rpartition(".")[0]


class StoredTensors(Protocol):
    """The tensors of a checkpoint, in the types that they are stored in."""

    def __contains__(self, name: str) -> bool: ...

    def read_stored(self, name: str) -> Tensor:
        """The whole tensor. Raises ModelError where it is missing."""


class Module(NamedTuple):
    """A linear layer whose weight is [out, in]."""

    tensors: StoredTensors
    name: str
    shape: tuple[int, int]

    def has(self, suffix: str) -> bool:
        """Whether it has a tensor called so."""
        return f"{self.name}.{suffix}" in self.tensors

    def read(self, suffix: str) -> Tensor:
        """Its tensor called so."""
        return self.tensors.read_stored(f"{self.name}.{suffix}")

    def checked(self, suffix: str, found: Tensor, wanted: tuple[int, ...]) -> Tensor:
        """`found`. Raises ModelError where it is not of the shape `wanted`."""
        if tuple(found.shape) != wanted:
            shapes = f"unpacks to {list(found.shape)}, the config asks for {list(wanted)}"
            raise ModelError(f"tensor {self.name}.{suffix} {shapes}")
        return found


class ReadWeight(NamedTuple):
    """A weight as a checkpoint has it: codes where products can be made of them, else numbers."""

    codes: QuantizedWeight | None
    numbers: Tensor | None = None
    """float32"""


def read_module(module: Module, method: QuantizationMethod) -> ReadWeight | None:
    """The module's weight; None where it is not quantised. Raises ModelError for tensors that do not fit together."""
    try:
        return _READERS[method.layout or method.name](module, method)
    except RuntimeError as error:  # PyTorch's, of shapes
        raise ModelError(f"tensors of {module.name} do not fit together: {error}") from None


def _compressed(module: Module, method: QuantizationMethod) -> ReadWeight | None:
    if not module.has("weight_packed"):
        return _bytes(module, "weight_scale", method)
    out, inputs = module.shape
    words = module.read("weight_packed")
    if words.dtype == torch.uint8:
        return _e2m1(module, "weight_packed", words)
    bits = _bits(module, words.shape[1] * 32 // inputs)
    codes = module.checked("weight_packed", unpack_columns(words, bits)[:, :inputs], (out, inputs))
    scales = module.read("weight_scale").float().view(out, -1)
    zeros = None
    if module.has("weight_zero_point"):
        zeros = module.checked(
            "weight_zero_point", unpack_rows(module.read("weight_zero_point"), bits)[:out], scales.shape
        )
    groups = module.read("weight_g_idx") if module.has("weight_g_idx") else None
    read = _read(bits, codes, scales, zeros, groups, _group_size(module, scales, method))
    return _with_offsets(module, read) if module.has("weight_offset") else read


def _e2m1(module: Module, suffix: str, packed: Tensor, scale: str = "weight_scale") -> ReadWeight:
    """Twice a number of four bits is a whole one. A tensor may have one scale for all besides. `scale`: of groups."""
    _refuse_zero_points(module)
    out, inputs = module.shape
    codes = module.checked(suffix, unpack_e2m1(packed), (out, inputs))
    scales = _as_numbers(module.read(scale)).view(out, -1) / 2
    if module.has("weight_global_scale"):
        scales = scales / module.read("weight_global_scale").float().view(())
    elif module.has("weight_scale_2"):
        scales = scales * module.read("weight_scale_2").float().view(())
    return _quantized("int8", codes, scales, None, max(1, inputs // scales.shape[1]))


def _with_offsets(module: Module, read: ReadWeight) -> ReadWeight:
    """Raises ModelError where there are no groups that can have them."""
    if read.codes is None or read.codes.group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ModelError(f"tensor {module.name}.weight_offset: its scales are not of groups of {sizes} inputs")
    offsets = module.checked("weight_offset", module.read("weight_offset"), tuple(read.codes.scales.shape))
    return ReadWeight(read.codes._replace(offsets=offsets.float()))


def _gptq(module: Module, method: QuantizationMethod) -> ReadWeight | None:
    if not module.has("qweight"):
        return None
    out, inputs = module.shape
    words = module.read("qweight")
    bits = _bits(module, words.shape[0] * 32 // inputs, GPTQ_BITS)
    _check_threes(module, "qweight", words.shape[0], bits)
    codes = module.checked("qweight", unpack_rows(words, bits).T, (out, inputs))
    scales = module.read("scales").float().T.contiguous()
    packed = module.read("qzeros")
    _check_threes(module, "qzeros", packed.shape[1], bits)
    zeros = unpack_columns(packed, bits)[:, :out].T.to(torch.int16) + method.zeros_less_one
    zeros = module.checked("qzeros", zeros, scales.shape) & ((1 << bits) - 1)
    groups = module.read("g_idx") if module.has("g_idx") else None
    return _read(bits, codes, scales, zeros.to(torch.uint8), groups, _group_size(module, scales, method))


def _check_threes(module: Module, suffix: str, words: int, bits: int) -> None:
    """Raises ModelError where codes of three bits end within a word."""
    if bits == 3 and words % 3:
        raise ModelError(
            f"tensor {module.name}.{suffix} has {words} words of codes of 3 bits; a multiple of 3 is needed"
        )


def _awq(module: Module, method: QuantizationMethod) -> ReadWeight | None:
    if not module.has("qweight"):
        return None
    out, inputs = module.shape
    codes = module.checked("qweight", unpack_awq(module.read("qweight")).T, (out, inputs))
    scales = module.read("scales").float().T.contiguous()
    zeros = (
        module.checked("qzeros", unpack_awq(module.read("qzeros")).T, scales.shape) if module.has("qzeros") else None
    )
    return _read(4, codes, scales, zeros, None, _group_size(module, scales, method))


def _fp8(module: Module, method: QuantizationMethod) -> ReadWeight | None:
    return _bytes(module, "weight_scale_inv" if module.has("weight_scale_inv") else "weight_scale", method)


def _torchao(module: Module, method: QuantizationMethod) -> ReadWeight | None:
    if not module.has("_weight_qdata"):
        return None
    if module.has("_weight_act_pre_scale"):
        raise ModelError(f"tensor {module.name}._weight_act_pre_scale: {_SCALED_INPUTS}")
    (out, inputs), name = module.shape, "_weight_qdata"
    codes, scales = module.read(name), module.read("_weight_scale").float()
    if tuple(codes.shape) == (out, inputs // 2) and module.has("_weight_zero_point"):
        return _torchao_int4(module, codes.view(torch.uint8), scales.T.contiguous())
    _refuse_zero_points(module, "_weight_zero_point")
    if scales.numel() != 1 and len(scales) != out:
        raise ModelError(f"tensor {module.name}._weight_scale: scales of blocks are not supported")
    return _scaled_bytes(module, name, codes, scales, method)


def _torchao_int4(module: Module, packed: Tensor, scales: Tensor) -> ReadWeight:
    codes = torch.stack((packed & 15, packed >> 4), dim=2).flatten(1) ^ 8
    offsets = module.read("_weight_zero_point").float().T.contiguous()
    weight = QuantizedWeight("int4", codes, scales, offsets=module.checked("_weight_zero_point", offsets, scales.shape))
    known = weight.group_size in GROUP_SIZES and weight.group_size * scales.shape[1] == module.shape[1]
    return ReadWeight(weight) if known else ReadWeight(None, weight.dequantized(torch.float32))


def _hqq(module: Module, method: QuantizationMethod) -> ReadWeight | None:
    if not module.has("W_q"):
        return None
    (out, inputs), packed = module.shape, module.read("W_q")
    scales, zeros = module.read("scale").float(), module.read("zero").float()
    bits = _bits(module, 8 * packed.numel() // (out * inputs))
    if packed.dtype != torch.uint8:
        raise ModelError(f"tensor {module.name}.W_q has dtype {packed.dtype}; uint8 can be read")
    codes = torch.cat((packed >> 4, packed & 15)) if bits == 4 else packed
    size, middle = codes.shape[1], 1 << (bits - 1)
    if scales.shape[1] != 1 or size not in GROUP_SIZES or inputs % size:
        return ReadWeight(None, ((codes.float() - zeros) * scales).view(out, inputs))
    codes, scales, zeros = codes.view(out, inputs), scales.view(out, -1), zeros.view(out, -1)
    # Zero points are no whole numbers.
    offsets = (middle - zeros) * scales
    if bits == 4:
        return ReadWeight(QuantizedWeight("int4", codes, scales, offsets=offsets))
    return ReadWeight(QuantizedWeight("int8", codes ^ _SIGNED, scales, offsets=offsets))


class _FourBitState(Struct):
    blocksize: int
    nested_blocksize: int = 0
    nested_offset: float = 0.0


def _bitsandbytes(module: Module, method: QuantizationMethod) -> ReadWeight | None:
    for kind in ("nf4", "fp4"):
        if module.has(f"weight.quant_state.bitsandbytes__{kind}"):
            return ReadWeight(None, _four_bits(module, f"weight.quant_state.bitsandbytes__{kind}"))
    if not module.has("SCB"):
        return None
    weight = module.checked("weight", module.read("weight"), module.shape)
    scales = module.read("SCB").float().view(-1, 1) / 127
    return ReadWeight(QuantizedWeight("int8", weight.view(torch.uint8), scales))


def _four_bits(module: Module, state_name: str) -> Tensor:
    """Their numbers are no whole ones times anything."""
    packed, raw = module.read("weight").flatten().view(torch.uint8), module.read(state_name)
    if 2 * len(packed) != module.shape[0] * module.shape[1]:
        raise ModelError(f"tensor {module.name}.weight has {2 * len(packed)} codes, the config asks for {module.shape}")
    if packed.is_meta:
        return packed.new_empty(module.shape, dtype=torch.float32)
    try:
        state = msgspec.json.decode(raw.numpy(force=True).tobytes(), type=_FourBitState)
    except msgspec.MsgspecError as error:
        raise ModelError(f"tensor {module.name}.{state_name}: {error}") from None
    greatest = module.read("weight.absmax")
    if module.has("weight.nested_absmax"):
        scales = module.read("weight.nested_absmax").repeat_interleave(state.nested_blocksize)[: len(greatest)]
        greatest = module.read("weight.nested_quant_map")[greatest.int()] * scales + state.nested_offset
    numbers = module.read("weight.quant_map")[torch.stack((packed >> 4, packed & 15), dim=1).flatten().int()]
    return (numbers * greatest.repeat_interleave(state.blocksize)[: len(numbers)]).view(module.shape)


_READERS: dict[str, Callable[[Module, QuantizationMethod], ReadWeight | None]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _fp8,
    "quark": _fp8,
    "torchao": _torchao,
    "hqq": _hqq,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": lambda _module, _method: None,  # of experts alone, see `mixture.biased_experts`
}


def _bits(module: Module, bits: int, known: tuple[int, ...] = (4, 8)) -> int:
    if bits not in known:
        can = ", ".join(map(str, known))
        raise ModelError(f"the codes of {module.name} have {bits} bits for each weight; what can be read: {can}")
    return bits


def _bytes(module: Module, suffix: str, method: QuantizationMethod) -> ReadWeight | None:
    """Weights of one byte each beside their scales: for all, for each output, for groups of inputs or for blocks."""
    if not module.has(suffix):
        return None
    if module.has("pre_quant_scale"):
        raise ModelError(f"tensor {module.name}.pre_quant_scale: {_SCALED_INPUTS}")
    weight = module.read("weight")
    two_in_a_byte = tuple(weight.shape) == (module.shape[0], module.shape[1] // 2)
    if weight.dtype == torch.uint8 or (weight.dtype == torch.int8 and two_in_a_byte):
        return _e2m1(module, "weight", weight.view(torch.uint8), suffix)
    _refuse_zero_points(module)
    return _scaled_bytes(module, "weight", weight, _as_numbers(module.read(suffix)), method)


def _scaled_bytes(
    module: Module, suffix: str, weight: Tensor, scales: Tensor, method: QuantizationMethod
) -> ReadWeight:
    weight = module.checked(suffix, weight, module.shape)
    if weight.dtype not in (torch.int8, _FP8):
        raise ModelError(f"tensor {module.name}.{suffix} has dtype {weight.dtype}; int8 and float8_e4m3fn can be read")
    code: Code = "fp8" if weight.dtype == _FP8 else "int8"
    scales = _scales_of_outputs(scales, module.shape[0], method.block)
    size = module.shape[1] // scales.shape[1] if method.block is None else method.block[1]
    read = _quantized(code, weight.view(torch.uint8), scales, None, size)
    # Of a block that has all inputs, too: other matrices of such files stay W8A16.
    rounds = method.activations == code and method.block is None
    if not rounds or read.codes is None or scales.shape[1] != 1:
        return read
    return ReadWeight(read.codes._replace(rounded_activations=True))


def _refuse_zero_points(module: Module, suffix: str = "weight_zero_point") -> None:
    """Some files have zeros for them."""
    points = module.read(suffix) if module.has(suffix) else None
    if points is not None and not points.is_meta and points.any():
        raise ModelError(f"tensor {module.name}.{suffix}: zero points other than 0 are not supported")


def _as_numbers(scales: Tensor) -> Tensor:
    """float32; bytes are exponents of two."""
    return powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()


def _scales_of_outputs(scales: Tensor, out: int, block: tuple[int, int] | None) -> Tensor:
    """[out, groups] of one for all, one for each output, or one for each block, the last of which may be smaller."""
    if scales.numel() == 1:
        return scales.view(1, 1).expand(out, 1).contiguous()
    if block is None:
        return scales.view(out, -1).contiguous()
    return scales.view(len(scales), -1).repeat_interleave(block[0], dim=0)[:out].contiguous()


def _group_size(module: Module, scales: Tensor, method: QuantizationMethod) -> int:
    """Inputs that share one of `scales` [out, groups]; the last group may have fewer. Raises ModelError where nothing
    says how many."""
    inputs, count, said = module.shape[1], scales.shape[1], method.group_size
    if said is not None and -(-inputs // said) == count:
        return said
    if inputs % count:
        size = "it says no group_size" if said is None else f"group_size {said} makes others"
        raise ModelError(f"{module.name} has {count} scales for {inputs} inputs, and of quantization_config {size}")
    return inputs // count


def _read(
    bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor | None, size: int
) -> ReadWeight:
    """`groups`: the group of each input, where they may lie in any order; else they are of `size` inputs. Tensors
    without elements are taken for the usual ones."""
    codes = codes.contiguous()
    in_order = torch.arange(codes.shape[1], device=codes.device) // size
    known = not codes.is_meta
    if groups is not None and known and not torch.equal(groups.long(), in_order):
        return ReadWeight(None, _by_groups(bits, codes, scales, zeros, groups.long()))
    if bits <= 4:  # whose codes are some of int4's
        return _quantized("int4", codes, scales, zeros, size)
    if zeros is not None and known and (zeros != _SIGNED).any():
        return ReadWeight(None, _by_groups(bits, codes, scales, zeros, in_order))
    return _quantized("int8", codes ^ _SIGNED, scales, None, size)


def _by_groups(bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, groups: Tensor) -> Tensor:
    zero = float(1 << (bits - 1)) if zeros is None else zeros.float()[:, groups]
    return (codes.float() - zero) * scales[:, groups]


def _quantized(code: Code, codes: Tensor, scales: Tensor, zeros: Tensor | None, size: int) -> ReadWeight:
    """`size`: inputs that share a scale. Numbers where products know no such groups."""
    inputs, count = codes.shape[1], scales.shape[1]
    if count == 1 or (size in GROUP_SIZES and size * count == inputs):
        return ReadWeight(QuantizedWeight(code, codes, scales, None if zeros is None else zeros.contiguous()))
    numbers = QuantizedWeight(code, codes, scales.new_ones(len(codes), 1)).numbers if zeros is None else codes.float()
    if zeros is not None:
        numbers -= zeros.float().repeat_interleave(size, dim=1)[:, :inputs]
    return ReadWeight(None, numbers * scales.repeat_interleave(size, dim=1)[:, :inputs])
