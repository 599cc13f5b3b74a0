"""How a checkpoint is quantised, by its `quantization_config`. Refuses what cannot be read before memory is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from services.worker.models.config import ModelError, plain_json
from services.worker.ops.quantized import Code

MethodName = Literal[
    "compressed-tensors",
    "gptq",
    "awq",
    "auto-round",
    "fp8",
    "fbgemm_fp8",
    "modelopt",
    "quark",
    "torchao",
    "hqq",
    "bitsandbytes",
    "mxfp4",
]

_Read = TypeVar("_Read", bound=Struct)

_E2M1 = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized", *_E2M1)
_BITS = (4, 8)
GPTQ_BITS = (2, 3, *_BITS)

_QUARK = ("fp8_e4m3", "int8", "fp4", "fp4+fp8_e4m3")
_AUTO_ROUND: dict[str, MethodName] = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round": "gptq",
    "auto_round:gptqmodel": "gptq",
    "auto_round:llm_compressor": "compressed-tensors",
}
"""Only the first of GPTQ's has zero points less 1."""

_TORCHAO: dict[str, Code | None] = {
    "Float8WeightOnlyConfig": None,
    "Float8DynamicActivationFloat8WeightConfig": "fp8",
    "Int8WeightOnlyConfig": None,
    "Int4WeightOnlyConfig": None,
    "FqnToConfig": None,
    "ModuleFqnToConfig": None,
}
"""What rows are rounded to."""

_MODELOPT_BLOCK = (128, 128)
_MODELOPT: dict[str, Code | None] = {
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PB_WO": None,
    "MXFP8": None,
    "NVFP4": None,
    "W4A16_NVFP4": None,
    "MIXED_PRECISION": "fp8",
}
"""What rows are rounded to for weights of fp8 with a scale for each output."""


class _WeightScheme(Struct, kw_only=True):
    num_bits: int
    type: str
    strategy: str = "tensor"
    group_size: int | None = None
    block_structure: list[int] | None = None


class _ActivationScheme(Struct, kw_only=True):
    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    symmetric: bool = True
    dynamic: bool | str = False

    @property
    def code(self) -> Code | None:
        """What each row is rounded to by its own greatest; None: it stays as it is. In fp8 it is, too,
        where one scale of all rows was asked for (static, or of a tensor): that is closer to the numbers."""
        match self.num_bits, self.type, self.strategy:
            case 8, "int", "token" if self.symmetric and self.dynamic is True:
                return "int8"
            case 8, "float", "token" | "tensor" if self.symmetric:
                return "fp8"
        return None


class _ConfigGroup(Struct, kw_only=True):
    weights: _WeightScheme | None = None
    input_activations: _ActivationScheme | None = None
    format: str | None = None


class _QuarkScheme(Struct, kw_only=True):
    dtype: str
    qscheme: str | None = None
    symmetric: bool | None = None
    is_dynamic: bool | None = None


class _QuarkGroup(Struct, kw_only=True):
    weight: _QuarkScheme | list[_QuarkScheme] | None = None
    """Several: each scale of the one before is kept as the next one says."""
    input_tensors: _QuarkScheme | list[_QuarkScheme] | None = None

    @property
    def activations(self) -> Code | None:
        """See `_ActivationScheme.code`."""
        rows = self.input_tensors
        if not isinstance(rows, _QuarkScheme) or rows.qscheme not in ("per_channel", "per_tensor"):
            return None
        if rows.dtype == "fp8_e4m3":
            return "fp8"
        by_token = rows.qscheme == "per_channel" and rows.is_dynamic is True and rows.symmetric is not False
        return "int8" if rows.dtype == "int8" and by_token else None


class _TorchaoType(Struct, rename={"name": "_type"}):
    name: str


class _ModelOptQuantization(Struct, kw_only=True):
    quant_algo: str | None = None


class _RawQuantization(Struct, kw_only=True):
    """The keys that matter of all methods; which modules are quantised is seen by their tensors."""

    quant_method: str = "compressed-tensors"
    format: str | None = None
    config_groups: dict[str, _ConfigGroup] = {}
    sparsity_config: dict[str, object] | None = None
    transform_config: dict[str, object] | None = None
    bits: int = 4
    group_size: int | None = None
    checkpoint_format: str = "gptq"
    version: str = "gemm"
    load_in_8bit: bool = False
    expert_dtype: str | None = None
    """Of fp8, where experts are other codes."""
    quant_algo: str | None = None
    quantization: _ModelOptQuantization | None = None
    """In hf_quant_config.json `quant_algo` lies here."""
    packing_format: str = "auto_round:auto_gptq"
    data_type: str = "int"
    quant_type: dict[str, _TorchaoType] | str | None = None
    global_quant_config: _QuarkGroup | None = None
    layer_quant_config: dict[str, _QuarkGroup] | None = None
    weight_block_size: Annotated[list[int], Meta(min_length=2, max_length=2)] | None = None


class _RawPart(Struct, kw_only=True):
    quantization_config: _RawQuantization | None = None


class _RawQuantizedConfig(_RawPart, kw_only=True):
    text_config: _RawPart | None = None
    """Some say it there, of a model of images or sounds."""
    expert_dtype: str | None = None
    """DeepSeek-V4 says that beside `quantization_config`."""


class QuantizationMethod(Struct, frozen=True):
    """What a checkpoint's tensors are to be read as."""

    name: MethodName
    layout: MethodName | None = None
    """The method that has the same tensors; None: itself."""
    zeros_less_one: bool = False
    """gptq: whether zero points are stored less 1, as the first version of its format has them."""
    block: tuple[int, int] | None = None
    """The outputs and inputs that share a scale."""
    group_size: int | None = None
    """gptq, awq, compressed-tensors: inputs that share a scale, the last of which may be fewer; None: all modules' are
    as many as there are scales for."""
    activations: Code | None = None
    """What rows are rounded to, with a scale for each token, that weights of the same with a scale for each output are
    multiplied with; None: they stay as they are."""
    growth: int = 1
    """How many times the bytes of their file weights take in memory, about."""


def read_method(model_dir: Path) -> QuantizationMethod | None:
    """How the checkpoint in `model_dir` is quantised; None: not at all. Raises ModelError for what cannot be read."""
    path = model_dir / "config.json"
    whole = _read(path, _RawQuantizedConfig)
    raw = whole.quantization_config
    if raw is None and whole.text_config is not None:
        raw = whole.text_config.quantization_config
    said = f"{path}: quantization_config"
    own_file = model_dir / "hf_quant_config.json"
    if raw is None and own_file.is_file():
        raw, said = _read(own_file, _RawQuantization), str(own_file)
        raw.quant_method = "modelopt"
    if raw is not None and raw.expert_dtype is None:
        raw.expert_dtype = whole.expert_dtype
    try:
        return None if raw is None else _method(raw)
    except ModelError as error:
        raise ModelError(f"{said}: {error}") from None


def _read(path: Path, of: type[_Read]) -> _Read:
    try:
        return msgspec.json.decode(plain_json(path.read_bytes()), type=of)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: {error}") from None


def _method(raw: _RawQuantization) -> QuantizationMethod:
    match raw.quant_method:
        case "compressed-tensors":
            return QuantizationMethod(
                "compressed-tensors",
                block=_compressed_block(raw),
                activations=_compressed_activations(raw),
                growth=_growth(any((each.format or raw.format) in _E2M1 for each in raw.config_groups.values())),
                group_size=_compressed_group(raw),
            )
        case "gptq":
            _check("bits", raw.bits, GPTQ_BITS)
            _check("checkpoint_format", raw.checkpoint_format, ("gptq", "gptq_v2"))
            zeros_less_one = raw.checkpoint_format == "gptq"
            return QuantizationMethod(
                "gptq",
                zeros_less_one=zeros_less_one,
                growth=_growth(raw.bits < 4),
                group_size=_group_size(raw.group_size),
            )
        case "awq":
            _check("bits", raw.bits, (4,))
            _check("version", raw.version.lower(), ("gemm",))
            return QuantizationMethod("awq", group_size=_group_size(raw.group_size))
        case "fp8":
            block = raw.weight_block_size
            return QuantizationMethod(
                "fp8",
                block=None if block is None else (block[0], block[1]),
                activations="fp8",
                growth=_growth(raw.expert_dtype == "fp4"),
            )
        case "fbgemm_fp8":
            return QuantizationMethod("fbgemm_fp8", activations="fp8")
        case "auto-round" | "auto_round" | "intel/auto-round":
            return _auto_round(raw)
        case "quark":
            return _quark(raw)
        case "hqq":
            return QuantizationMethod("hqq")
        case "torchao":
            of_all = raw.quant_type.get("default") if isinstance(raw.quant_type, dict) else None
            name = raw.quant_type if of_all is None else of_all.name
            _check("quant_type", name, tuple(_TORCHAO))
            return QuantizationMethod("torchao", activations=_TORCHAO[str(name)])
        case "modelopt" | "modelopt_fp4" | "modelopt_mixed":
            return _modelopt(raw)
        case "bitsandbytes":
            # Four bits become numbers.
            return QuantizationMethod("bitsandbytes", growth=1 if raw.load_in_8bit else 4)
        case "mxfp4":
            return QuantizationMethod("mxfp4", growth=_growth(True))
        case other:
            raise ModelError(f"quant_method {other!r} is not supported; supported: {', '.join(get_args(MethodName))}")


def _growth(doubled: bool) -> int:
    """Their codes are read as such of twice the bits, or nearly."""
    return 2 if doubled else 1


def _modelopt(raw: _RawQuantization) -> QuantizationMethod:
    algorithm = (raw.quant_algo or (raw.quantization and raw.quantization.quant_algo) or "").upper()
    _check("quant_algo", algorithm, tuple(_MODELOPT))
    block = _MODELOPT_BLOCK if algorithm == "FP8_PB_WO" else None
    return QuantizationMethod(
        "modelopt",
        block=block,
        activations=_MODELOPT[algorithm],
        growth=_growth("NVFP4" in algorithm or algorithm == "MIXED_PRECISION"),
    )


def _auto_round(raw: _RawQuantization) -> QuantizationMethod:
    _check("packing_format", raw.packing_format, tuple(_AUTO_ROUND))
    layout = _AUTO_ROUND[raw.packing_format]
    allowed = {"awq": (4,), "gptq": GPTQ_BITS}
    _check("bits", raw.bits, allowed.get(layout, _BITS))
    floats = layout == "compressed-tensors"
    # Behind them may be how scales were found.
    if not raw.data_type.startswith(kinds := ("mx_fp", "nv_fp") if floats else ("int",)):
        _check("data_type", raw.data_type, kinds)
    return QuantizationMethod(
        "auto-round",
        layout,
        zeros_less_one=raw.packing_format == "auto_round:auto_gptq",
        growth=_growth((floats and raw.bits == 4) or raw.bits < 4),
        group_size=_group_size(raw.group_size),
    )


def _quark(raw: _RawQuantization) -> QuantizationMethod:
    groups = {"global_quant_config": raw.global_quant_config, **(raw.layer_quant_config or {})}
    found = {name: group for name, group in groups.items() if group is not None and group.weight is not None}
    types: set[str] = set()
    for name, group in found.items():
        assert group.weight is not None, "it has one"
        kinds = "+".join(each.dtype for each in (group.weight if isinstance(group.weight, list) else [group.weight]))
        _check(f"{name}.weight.dtype", kinds, _QUARK)
        types.add(kinds)
    activations = {group.activations for group in found.values()}
    return QuantizationMethod(
        "quark",
        activations=activations.pop() if len(activations) == 1 else None,
        growth=_growth(any(each.startswith("fp4") for each in types)),
    )


def _compressed_block(raw: _RawQuantization) -> tuple[int, int] | None:
    """The shape of its blocks, after it was checked; None where it has none."""
    block = None
    if raw.transform_config or (raw.sparsity_config and raw.sparsity_config.get("format", "dense") != "dense"):
        raise ModelError("sparse and transformed weights of compressed-tensors are not supported")
    for name, group in raw.config_groups.items():
        layout = group.format or raw.format
        _check("format", layout, _FORMATS)
        weights = group.weights
        if weights is None:
            continue
        _check(f"{name}.weights.type", weights.type, ("int", "float"))
        float_bits = (4,) if layout in _E2M1 else (8,)
        _check(f"{name}.weights.num_bits", weights.num_bits, _BITS if weights.type == "int" else float_bits)
        _check(f"{name}.weights.strategy", weights.strategy, ("tensor", "channel", "group", "tensor_group", "block"))
        if weights.strategy == "block":
            rows, columns = weights.block_structure or (0, 0)
            block = rows, columns
    return block


def _compressed_group(raw: _RawQuantization) -> int | None:
    """That of all groups of modules; None where they differ."""
    sizes = {_group_size(group.weights.group_size) for group in raw.config_groups.values() if group.weights is not None}
    return sizes.pop() if len(sizes) == 1 else None


def _group_size(said: int | None) -> int | None:
    """None for what stands for all inputs."""
    return said if said is not None and said > 0 else None


def _compressed_activations(raw: _RawQuantization) -> Code | None:
    """Which group a module is of is not known here: all have to say the same."""
    groups = [group for group in raw.config_groups.values() if group.weights is not None]
    codes = {None if group.input_activations is None else group.input_activations.code for group in groups}
    return codes.pop() if len(codes) == 1 else None


def _check(key: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ModelError(f"{key} {value!r} is not supported; supported: {', '.join(map(str, allowed))}")
