"""Reads LoRA adapters as PEFT writes them, `adapter_config.json` and `adapter_model.safetensors`; refuses what would be
computed otherwise than it was trained. Shapes are checked before a weight is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.worker.models.config import ModelConfig, ModelError
from services.worker.models.hf_layers.tensor_names import tensor_names
from services.worker.models.lora.adapted_modules import module_sizes, named_in
from services.worker.models.published.names import library_names
from services.worker.models.published.transposed import has_transposed
from services.worker.models.weights import NamedModules
from shared.ids import LoraId, ModelName

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EMBEDDING, HEAD = "embed_tokens", "lm_head"
_WHOLE = r"base_model\.model\.(?:language_model\.|thinker\.)?"
"""What stands before names of the language model; PEFT has those of all of a model with images, by its release."""
_BODY = rf"{_WHOLE}(?:model\.language_model|model\.text_model|model|backbone)"
_BASE = "base_model.model."
_ANY_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations that also change the base model, unless PEFT converts the adapter when it saves it."""
_DIGEST_BYTES = 16
_FLOATS = ("F16", "BF16", "F32", "F64")


class LoraPair(NamedTuple):
    """One module's low-rank product: x → b @ (a @ x) is added to what the module gives."""

    a: Tensor
    """[rank, in]; of the embedding [rank, vocab]."""
    b: Tensor
    """[out, rank], with the adapter's scale in it."""


class LoraAdapter(NamedTuple):
    """An adapter in main memory, whole, in float32 or the type that it was trained in."""

    name: ModelName
    id: LoraId
    """A digest of what it computes: adapters that compute alike have the same."""
    rank: int
    layers: dict[tuple[int, str], LoraPair]
    """By layer and projection, such as `self_attn.q_proj`."""
    embedding: LoraPair | None
    head: LoraPair | None


class _PeftConfig(Struct, frozen=True):
    """What is read of adapter_config.json."""

    r: int
    lora_alpha: float
    peft_type: str
    use_rslora: bool = False
    use_dora: bool = False
    bias: str = "none"
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str | None = True
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    layer_replication: Any = None
    target_parameters: Any = None
    trainable_token_indices: Any = None
    alora_invocation_tokens: Any = None
    use_qalora: bool = False

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def read_adapter(name: ModelName, folder: Path, config: ModelConfig | NamedModules, max_rank: int) -> LoraAdapter:
    """The adapter in `folder`, for the model of this `config`, or with these modules. Raises ModelError, which names
    file, field and value, where it cannot be served."""
    # What lies transposed in the base model is no matter where its modules say what they are.
    transposed = not isinstance(config, ModelConfig) or has_transposed(config.architecture)
    peft = _read_config(folder, max_rank, transposed=transposed)
    path = folder / WEIGHTS
    if not path.is_file():
        others = ", ".join(sorted(each.name for each in folder.glob("adapter_model.*"))) or "nothing of the kind"
        raise ModelError(f"{path}: there is no such file, but {others}; only safetensors can be read")
    try:
        with safe_open(path, framework="pt") as file:
            found = dict(_modules(path, file, peft.r, config))
            if not found:
                raise ModelError(f"{path}: it has no lora_A and lora_B of any module")
            pairs = {key: _pair(path, file, names, peft.scale) for key, names in found.items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: {error}") from None
    return LoraAdapter(
        name=name,
        id=_digest(pairs),
        rank=peft.r,
        layers={key: pair for key, pair in pairs.items() if key[1] not in (EMBEDDING, HEAD)},
        embedding=pairs.get((0, EMBEDDING)),
        head=pairs.get((0, HEAD)),
    )


def _read_config(folder: Path, max_rank: int, *, transposed: bool) -> _PeftConfig:
    path = folder / CONFIG
    try:
        peft = msgspec.json.decode(path.read_bytes(), type=_PeftConfig)
    except FileNotFoundError:
        raise ModelError(f"{path}: there is no such file; an adapter is a folder as PEFT writes it") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: {error}") from None
    init = peft.init_lora_weights if isinstance(peft.init_lora_weights, str) else ""
    for field, allowed, served in (
        ("peft_type", "LORA is", peft.peft_type == "LORA"),
        ("r", f"1 to max_lora_rank, which is {max_rank}, are", 1 <= peft.r <= max_rank),
        ("lora_alpha", "a finite number is", math.isfinite(peft.lora_alpha)),
        ("use_dora", "false is", not peft.use_dora),
        ("use_qalora", "false is", not peft.use_qalora),
        ("bias", "none is", peft.bias == "none"),
        ("lora_bias", "false is", not peft.lora_bias),
        ("fan_in_fan_out", "false is", transposed or not peft.fan_in_fan_out),
        ("init_lora_weights", "what leaves the base model as it is, is", not init.lower().startswith(_CHANGES_BASE)),
        *((each, "none is", not getattr(peft, each)) for each in ("modules_to_save", "rank_pattern", "alpha_pattern")),
        *((each, "null is", not getattr(peft, each)) for each in ("layer_replication", "target_parameters")),
        *(
            (each, "null is", not getattr(peft, each))
            for each in ("trainable_token_indices", "alora_invocation_tokens")
        ),
    ):
        if not served:
            shown = msgspec.json.encode(getattr(peft, field)).decode()
            raise ModelError(f"{path}: {field} = {shown} is not supported; {allowed}")
    return peft


class _TensorPair(NamedTuple):
    a: str
    b: str


def _modules(
    path: Path, file: Any, rank: int, config: ModelConfig | NamedModules
) -> Iterator[tuple[tuple[int, str], _TensorPair]]:
    """The names of each module's two tensors, all of the right shape. Raises ModelError."""
    if isinstance(config, ModelConfig):
        found = _native_modules(path, file, config)
    else:
        found = _named_modules(path, file, config)
    for key, halves in sorted(found.items()):
        if len(halves) != 2:
            raise ModelError(f"{path}: tensor {next(iter(halves.values()))} has no counterpart")
        if isinstance(config, ModelConfig):
            inputs, outputs = _sizes(path, config, *key)
        elif config.is_elsewhere(key[1]):  # whose stage looks at the other size
            inputs, outputs = file.get_slice(halves["A"]).get_shape()[-1], file.get_slice(halves["B"]).get_shape()[0]
        else:
            inputs, outputs = config.products[key[1]].inputs, config.products[key[1]].outputs
        for half, wanted in (("A", [rank, inputs]), ("B", [outputs, rank])):
            part = file.get_slice(halves[half])
            if part.get_shape() != wanted:
                text = f"{path}: tensor {halves[half]} has shape {part.get_shape()}, r and the model ask for {wanted}"
                raise ModelError(text)
            if part.get_dtype() not in _FLOATS:
                text = f"{path}: tensor {halves[half]} has dtype {part.get_dtype()}; {', '.join(_FLOATS)} can be read"
                raise ModelError(text)
        yield key, _TensorPair(halves["A"], halves["B"])


_Halves = dict[tuple[int, str], dict[str, str]]
"""By layer and module the names of its tensors A and B."""


def _named_modules(path: Path, file: Any, modules: NamedModules) -> _Halves:
    """Of a model of the library, whose modules are of no layer here."""
    found: _Halves = {}
    head = modules.products.get(HEAD)
    for name in file.keys():  # noqa: SIM118 - no mapping
        match = _ANY_NAME.fullmatch(name)
        module = modules.own_name(name.removeprefix(_BASE) if match is None else match[1])
        if match is not None and (module in modules.products or modules.is_elsewhere(module)):
            found.setdefault((0, module), {})[match[2]] = name
        elif "lora_" not in name and modules.is_elsewhere(module):
            continue  # beside an adapter of the head, too
        elif head is None or "lora_" in name or file.get_slice(name).get_shape() != [head.outputs, head.inputs]:
            # Beside an adapter of the head PEFT writes what the model has as head and embedding.
            raise ModelError(f"{path}: tensor {name} belongs to no module that can have an adapter here")
    return found


class _AdapterNames(NamedTuple):
    """What tensors of adapters of a native model are called."""

    of_module: re.Pattern[str]
    base_copy: re.Pattern[str]
    """PEFT writes the base model's own matrix beside an adapter of the embedding or the head."""


@lru_cache
def _names(architecture: str) -> _AdapterNames:
    own = tensor_names(architecture)
    layers, embedding, head = (_WHOLE + re.escape(each) for each in (own.layers, own.embedding, own.head))
    layers = rf"(?:{_BODY}\.layers|{layers})"
    embedding = rf"(?:{_BODY}\.(?:{EMBEDDING}|embeddings)|{embedding})"
    of_layer = rf"{layers}\.(\d{{1,4}})\.([A-Za-z0-9_.]+)\.lora_([AB])\.weight"
    beside = rf"({head})\.lora_([AB])\.weight|({embedding})\.lora_embedding_([AB])"
    return _AdapterNames(
        re.compile(f"{of_layer}|{beside}"), re.compile(rf"(?:{embedding}|{head})\.(?:base_layer\.)?weight")
    )


def _native_modules(path: Path, file: Any, config: ModelConfig) -> _Halves:
    found: _Halves = {}
    names, rename = _names(config.architecture), library_names(config)
    for name in file.keys():  # noqa: SIM118 - no mapping
        known = name if rename is None else _BASE + rename(name.removeprefix(_BASE))
        if match := names.of_module.fullmatch(known):
            layer, projection, half, head, head_half, _, embedding_half = match.groups()
            numbers = config.layers_of_block(int(layer or 0))
            if not numbers and layer is not None and int(layer) < config.num_blocks:
                continue  # a text does not pass it, as Mllama's layers that attend to images
            if not numbers:
                raise ModelError(f"{path}: layer {layer} of {projection}; the model has {config.num_blocks} layers")
            projection = _module_of(config, numbers, int(layer or 0), projection)
            number = next((each for each in numbers if projection in module_sizes(config, each)), numbers[0])
            in_loops = projection is not None and config.layers[number].loop is not None
            for each in numbers if in_loops else (number,):
                key = (each, projection or (HEAD if head else EMBEDDING))
                found.setdefault(key, {})[half or head_half or embedding_half] = name
        elif not names.base_copy.fullmatch(known):
            raise ModelError(f"{path}: tensor {name} belongs to no module that can have an adapter here")
        elif (shape := file.get_slice(name).get_shape()) != [config.vocab_size, config.hidden_size]:
            table = [config.vocab_size, config.hidden_size]
            raise ModelError(f"{path}: tensor {name} has shape {shape}, the model's is {table}: words were added")
    return found


def _module_of(config: ModelConfig, layers: tuple[int, ...], block: int, module: str | None) -> str | None:
    """What the module of the checkpoint's layer `block`, which `layers` are, is called in them."""
    follows = module is not None and any(config.layers[each].following for each in layers)
    if module is None or not follows:
        return module
    first = config.layers[layers[0]].blocks
    own = first is not None and block == first[0] and module in module_sizes(config, layers[0])
    return module if own else named_in(block, module)


def _sizes(path: Path, config: ModelConfig, layer: int, module: str) -> tuple[int, int]:
    """Inputs and outputs of a module of the whole model. Raises ModelError where it can have no adapter."""
    hidden = config.hidden_size
    if module in (EMBEDDING, HEAD):
        if config.tied_embeddings:
            raise ModelError(f"{path}: target_modules: {module} is not supported where embedding and head are tied")
        return (config.vocab_size, hidden) if module == EMBEDDING else (hidden, config.vocab_size)
    sizes = module_sizes(config, layer)
    if module not in sizes and module.startswith("mlp.") and config.layers[layer].mixes:
        raise ModelError(f"{path}: target_modules: {module} of layer {layer}, which is a mixture of experts")
    if module not in sizes:
        raise ModelError(
            f"{path}: target_modules: {module} of layer {layer} is no module that can have an adapter here"
        )
    return sizes[module]


def _pair(path: Path, file: Any, names: _TensorPair, scale: float) -> LoraPair:
    a, b = (file.get_tensor(name) for name in names)
    for name, tensor in zip(names, (a, b), strict=True):
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{path}: tensor {name} holds NaN or infinity")
    return LoraPair(a, b.float() * scale)


def _digest(pairs: dict[tuple[int, str], LoraPair]) -> LoraId:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for key in sorted(pairs):
        pair = pairs[key]
        digest.update(f"{key} {list(pair.a.shape)} {list(pair.b.shape)}".encode())
        for tensor in pair:
            digest.update(tensor.float().contiguous().numpy().data)
    return LoraId(digest.digest())
