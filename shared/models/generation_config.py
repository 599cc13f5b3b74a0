"""What requests are sampled with that do not say: what a checkpoint's `generation_config.json` has, as vLLM takes it.

`do_sample` is not looked at, as vLLM does not: a temperature that is there counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shared.machine.home import expanded
from shared.messages.model_card import SamplingDefaults

FILE = "generation_config.json"
OWN, NEUTRAL = "auto", "vllm"
"""Settings beside a folder: the model's own file, or OpenAI's defaults; vLLM's words."""


class GenerationConfigError(ValueError):
    """A file, or what is to override it, that cannot be used; the text names key, value and what is allowed."""


class _RawSampling(Struct):
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None


class _SamplingOverride(_RawSampling, forbid_unknown_fields=True):
    """As the file; other keys of it would have no effect."""


def read_sampling_defaults(model: Path, choice: str = OWN, override: str | None = None) -> SamplingDefaults | None:
    """Of the model in a folder. `choice`: `auto`, `vllm`, or a folder that has the file. `override`: a JSON object; its
    keys win. None: OpenAI's. Raises GenerationConfigError."""
    found = _read(model, choice)
    if override is not None:
        own = read_override(override)
        found = msgspec.structs.replace(
            found, **{name: value for name, value in msgspec.structs.asdict(own).items() if value is not None}
        )
    defaults = SamplingDefaults(
        temperature=found.temperature,
        top_p=found.top_p,
        top_k=found.top_k,
        min_p=found.min_p,
        repetition_penalty=found.repetition_penalty,
        max_tokens=found.max_new_tokens,
    )
    return None if defaults == SamplingDefaults() else defaults


def read_override(text: str) -> Struct:
    """What is to win over the file. Raises GenerationConfigError."""
    try:
        return msgspec.json.decode(text, type=_SamplingOverride)
    except msgspec.MsgspecError as error:
        keys = ", ".join(_RawSampling.__struct_fields__)
        raise GenerationConfigError(f"{error}; a JSON object with keys of {keys} is wanted") from None


def _read(model: Path, choice: str) -> _RawSampling:
    if choice == NEUTRAL:
        return _RawSampling()
    path = (model if choice == OWN else expanded(choice)) / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=_RawSampling)
    except FileNotFoundError:
        if choice == OWN:
            return _RawSampling()
        raise GenerationConfigError(
            f"{path} does not exist; {OWN}, {NEUTRAL} or a folder that has it are allowed"
        ) from None
    except (msgspec.MsgspecError, OSError) as error:
        raise GenerationConfigError(f"{path}: {error}") from None
