"""What `transformers` says of a model: enough to size memory, and to describe it to the other services."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers
from msgspec import Struct
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from services.worker.models.config import Dtype, ModelError
from services.worker.models.fallback.adapters import implementation
from services.worker.models.fallback.attention import NAME, MixingLayers, answered_by, register
from services.worker.models.fallback.pipeline_stage import PassOfStage
from services.worker.models.hf_config import stop_tokens
from services.worker.models.pooling.classification import SUFFIX, TOKEN_SUFFIX
from shared.models.audio_models import WHISPER
from shared.models.encoder_models import ALONE, ENCODER_DECODER_ARCHITECTURES, TRAINED_POSITIONS
from shared.models.image_models import GEMMA3N, LIBRARY_IMAGE_ARCHITECTURES, SERVED_WITH_MEDIA, read_image_model
from shared.models.library_builds import BUILDING, first_line

NO_INTERFACE = "{} does not take its attention from transformers' attention interface"
_LENGTHS = ("max_position_embeddings", "max_target_positions", "n_positions", "max_seq_len", "seq_length")
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_BLOOM_POSITIONS = 2048
_STEP = "Step3p5ForCausalLM"
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "eos_token_id", "dtype", "torch_dtype")
"""Keys on which keys and values of tokens do not depend, beside the dtype, which the digest of a layout has."""
_TOWERS = (
    "vision_config",
    "vision_encoder_config",
    "audio_config",
    "audio_encoder_config",
    "thinker_config",
    "vq_config",
)
"""What a configuration has of them."""
_SIGHT = ("vision_config", "vision_encoder_config", "vq_config")
_BEHIND_EMBEDDING = "embed_tokens_extend"
"""The part of Phi-4 Multimodal that has its towers, and that a text passes, too."""
_SEE_WITHOUT_TOWERS = ("fuyu",)
"""By `model_type`."""
_ROUNDED = 2**-5
"""How far logits in bfloat16 may be off."""


class LibraryConfig(Struct, frozen=True, kw_only=True):
    """The same facts as :class:`services.worker.models.config.ModelConfig`, as far as the library has them."""

    architecture: str
    dtype: Dtype
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    eos_token_ids: tuple[int, ...]
    parameters: int
    settings_digest: str
    """Of everything in `config.json` that the model computes by."""


def library_config(
    folder: Path, *, trust_remote_code: bool, codes: bool
) -> tuple[LibraryConfig, PretrainedConfig, type[PreTrainedModel]]:
    """The configuration in `folder`, the library's own, and its class. Takes no memory for weights. `codes`: whether we
    read the checkpoint's codes, of which the library's configuration then says nothing.

    Raises ModelError where the library does not know the model, or knows it as none that we can serve."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        if _STEP in (config.architectures or ()):
            # Which releases that do not know the configuration do not have either.
            from services.worker.models.fallback.text_models.step import check_step, register_step

            check_step(folder)
            register_step()
        if GEMMA3N in (config.architectures or ()):
            config = _text_alone(config)
        _refuse_unsupported(config, codes=codes)
        if any(each.endswith((SUFFIX, TOKEN_SUFFIX)) for each in config.architectures or ()):
            config.tie_word_embeddings = True  # what is never asked for its logits needs no further table
        register()
        if reads_text(config):
            leave_out_encoder(config)
        with BUILDING, torch.device("meta"):
            model = auto_class(config).from_config(
                config, attn_implementation=implementation(config), trust_remote_code=trust_remote_code
            )
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None
    except KeyError as error:
        if error.args == (NAME,):  # the classes that a model has for each attention, in place of the interface
            raise ModelError(f"{folder}: {NO_INTERFACE.format(config.model_type)}") from None
        raise ModelError(f"{folder}: transformers cannot build the model: it does not know {error}") from None
    except Exception as error:  # whatever a model's own code raises for its configuration
        hint = "; --trust-remote-code runs code of the model's own" if "trust_remote_code" in str(error) else ""
        raise ModelError(f"{folder}: transformers cannot build the model: {first_line(error)}{hint}") from None
    try:
        described = _described(folder, config, model)
        for part in (config, config.get_text_config(decoder=True)) if codes else ():
            if hasattr(part, "quantization_config"):
                del part.quantization_config
        return described, config, type(model)
    except ModelError as error:
        raise ModelError(f"{folder}: {type(model).__name__}: {error}") from None
    except AttributeError as error:
        raise ModelError(f"{folder}: the configuration does not say enough: {first_line(error)}") from None


def _text_alone(config: Any) -> PretrainedConfig:
    """Of a model whose whole the library builds with a package of somebody's towers alone (timm), what reads text."""
    text: PretrainedConfig = config.get_text_config(decoder=True)
    text.architectures, text.dtype = config.architectures, config.dtype or text.dtype
    text.tie_word_embeddings = config.tie_word_embeddings
    if (codes := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = codes
    return text


def _described(folder: Path, config: PretrainedConfig, model: PreTrainedModel) -> LibraryConfig:
    text = config.get_text_config(decoder=True)
    return LibraryConfig(
        architecture=type(model).__name__,
        dtype=weights_dtype(config),
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=_layers(config, text),
        max_positions=_positions(text),
        eos_token_ids=stop_tokens(folder, getattr(text, "eos_token_id", None)),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        settings_digest=settings_digest(config),
    )


def has_mxfp4(config: PretrainedConfig) -> bool:
    """Whether experts are kept as blocks of four bits (OCP Microscaling Formats, as gpt-oss has them)."""
    quantization = getattr(config, "quantization_config", None)
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def _refuse_unsupported(config: PretrainedConfig, *, codes: bool) -> None:
    if codes and (hears(config) or reads_text(config)):
        raise ModelError("quantization_config is set: of models with an encoder, no quantised checkpoints are read")
    if reads_text(config):
        return
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise ModelError(
            f"model_type {config.model_type!r} is an encoder that is not supported; supported: "
            f"{', '.join(ALONE)}, and decoders"
        )
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False) and not hears(config):
        raise ModelError(
            f"model_type {config.model_type!r} is an encoder with a decoder: of these only Whisper and "
            f"{', '.join(ENCODER_DECODER_ARCHITECTURES)} can be served"
        )
    if getattr(text, "recurrent_kv_cache_mode", None) == "last_loop":
        raise ModelError("recurrent_kv_cache_mode 'last_loop' is not supported: every loop keeps keys and values")
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            of = next(iter(config.architectures or ()), config.model_type)
            raise ModelError(f"{of}: layer_types {kind!r} is not supported; supported: {', '.join(_LAYER_TYPES)}")


def hears(config: PretrainedConfig) -> bool:
    """Whether the model writes down what is said: its decoder attends to what an encoder made of a sound."""
    return WHISPER in (config.architectures or ())


def reads_text(config: PretrainedConfig) -> bool:
    """Whether the model's decoder attends to what an encoder made of a text (BART, T5)."""
    return any(each in ENCODER_DECODER_ARCHITECTURES for each in config.architectures or ())


def auto_class(config: PretrainedConfig) -> Any:
    """What builds the model: that of decoders, unless the library knows it only beside images or sounds."""
    if reads_text(config):
        return AutoModelForSeq2SeqLM
    return _multimodal_class(config) or AutoModelForCausalLM


def _multimodal_class(config: PretrainedConfig) -> Any:
    """None for a model that is one of texts, or one by its own code. A configuration may be of both (Emu3); its
    checkpoint is then of the class that it names."""
    own: Any = AutoModelForCausalLM
    if getattr(config, "auto_map", None):
        return None
    others = (AutoModelForImageTextToText, getattr(transformers, "AutoModelForMultimodalLM", None))
    known = [each for each in others if each is not None and type(config) in each._model_mapping]
    if type(config) in own._model_mapping:
        named = config.architectures or ()
        # Of a model with images that we read (Llama 4, Mllama) the library's decoder alone has the names we go by.
        if _class_name(own, config) in named or any(each in LIBRARY_IMAGE_ARCHITECTURES for each in named):
            return None
        known = [each for each in known if _class_name(each, config) in named]
    return next(iter(known), None)


def _class_name(auto: Any, config: PretrainedConfig) -> str:
    """Of what `auto` builds of `config`."""
    found = auto._model_mapping[type(config)]
    return str((found[0] if isinstance(found, tuple) else found).__name__)


@torch.inference_mode()
def leave_out_towers(model: nn.Module, config: PretrainedConfig, passing: PassOfStage) -> None:
    """Leaves of a model with images or sounds, or of a stage of one, what a text passes: its towers would take memory,
    and are never asked. A model that cannot compute a text stays as it is: whoever loads it says so. Raises ModelError
    where the library counts positions otherwise than from 0."""
    if not any(getattr(config, name, None) is not None for name in _TOWERS):
        return
    owner: Any = model
    seen = set[nn.Module]()

    def note(module: nn.Module, _inputs: tuple[Tensor, ...]) -> None:
        seen.add(module)

    handles = [module.register_forward_pre_hook(note) for module in model.modules()]
    positions = torch.arange(2).unsqueeze(0)
    ids = positions + 3
    size = config.get_text_config(decoder=True).hidden_size
    rows = None if passing.first is None else torch.linspace(-1, 1, 2 * size, dtype=owner.dtype).view(2, size)

    def computed(**beside: Tensor) -> Tensor:
        output = passing.run(lambda: owner(input_ids=ids, use_cache=False, **beside), rows)
        found: Tensor = output if isinstance(output, Tensor) else output.logits
        return found

    try:
        with answered_by(MixingLayers()):
            given, own = computed(position_ids=positions), computed()
    except Exception:  # of the library: it is tried again, and told, when the decoder is made
        return
    finally:
        for handle in handles:
            handle.remove()
    if not torch.allclose(given, own, rtol=_ROUNDED, atol=_ROUNDED * float(own.std())):
        raise ModelError(f"{type(model).__name__} counts positions otherwise than from 0, which is not supported")
    for parent in {model, owner.base_model, getattr(owner.base_model, _BEHIND_EMBEDDING, model)}:
        for name, child in parent.named_children():
            if not any(each in seen for each in child.modules()):
                setattr(parent, name, nn.Module())


def refuse_unserved_images(folder: Path, config: PretrainedConfig) -> None:
    """Raises ModelError for a model that sees or hears and whose images or sounds are not served: who names no flag
    wants them."""
    named = config.architectures or ()
    if (media := read_image_model(folder)) is not None and not media.by_library:
        kind = "sounds" if media.hears else "images"
        of = next(filter(SERVED_WITH_MEDIA.__contains__, named), config.model_type)
        raise ModelError(
            f"{folder}: {kind} of {of} are not served where transformers computes its language model (model_impl); "
            "--language-model-only serves it for texts"
        )
    if reads_text(config) or hears(config) or any(map(SERVED_WITH_MEDIA.__contains__, named)):
        return
    # A text model's file may have kept what another one said of a tower: a class of the library's names its own.
    foreign = not type(config).__module__.startswith("transformers.")
    seeing = [name for name in _SIGHT if getattr(config, name, None) is not None]
    sees = any(foreign or name in config.sub_configs for name in seeing) or config.model_type in _SEE_WITHOUT_TOWERS
    if sees or GEMMA3N in named:
        of = next(iter(named), config.model_type)
        raise ModelError(f"{folder}: images of {of} are not served; --language-model-only serves it for texts")


def leave_out_encoder(config: Any) -> None:
    """Has the library make the decoder alone: the encoder is another service's."""
    setattr(config, "encoder_layers" if hasattr(config, "encoder_layers") else "num_layers", 0)


def _layers(config: Any, text: Any) -> int:
    found: int = config.decoder_layers if hears(config) else text.num_hidden_layers
    if reads_text(config):
        found = config.decoder_layers if hasattr(config, "decoder_layers") else config.num_decoder_layers
    return found


def weights_dtype(config: PretrainedConfig) -> Dtype:
    """That of the checkpoint. Raises ModelError for one that is not supported."""
    name = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    match name:
        case "float32" | "bfloat16" | "float16":
            return name
        case _:
            raise ModelError(f"dtype {name!r} is not supported; supported: float32, bfloat16, float16")


def _positions(text: Any) -> int:
    for name in _LENGTHS:
        found = getattr(text, name, None)
        if isinstance(found, int) and found > 0:
            return found
    if text.model_type in ("mt5", "umt5"):
        return TRAINED_POSITIONS
    if text.model_type == "bloom":  # ALiBi has no bound: what it was trained with
        return _BLOOM_POSITIONS
    raise ModelError(f"the configuration says nothing of positions: one of {', '.join(_LENGTHS)} is expected")


def turns_as_long(config: PretrainedConfig, max_model_len: int) -> bool:
    """Whether a sequence may be longer than LongRoPE's (arXiv:2402.13753) first set of frequencies is for."""
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return rope.get("rope_type") == "longrope" and max_model_len > int(rope["original_max_position_embeddings"])


def settings_digest(config: PretrainedConfig) -> str:
    """Of everything in `config` that the model computes by."""
    own = {key: value for key, value in config.to_dict().items() if key not in _NOT_OF_THE_MODEL}
    return blake2b(json.dumps(own, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()
