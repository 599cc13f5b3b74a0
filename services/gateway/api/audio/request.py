"""The fields of `/v1/audio/transcriptions` and `/v1/audio/translations`, as OpenAI has them, checked."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple, get_args

from msgspec import Meta, Struct, field

from services.gateway.api.errors import RequestError, invalid, not_allowed, unsupported
from services.gateway.api.fields.ranges import INT64, RANGES
from services.gateway.api.generation import SEED_MASK
from shared.messages.model_card import AudioModel, ModelCard, TranscriptionChat

Task = Literal["transcribe", "translate"]
Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
FORMATS: tuple[str, ...] = get_args(Format)
Granularity = Literal["word", "segment"]
TIMED: tuple[Format, ...] = ("srt", "verbose_json", "vtt")
"""Those that say when something is said."""
STREAMED: tuple[Format, ...] = ("json", "text")

MAX_FILE_BYTES = 25 * 2**20
"""OpenAI's bound."""
MAX_PROMPT_BYTES = 16 * 2**10

Fields = dict[str, list[str]]
"""The form's fields but its file, by name. Names that end with [] may be there several times."""

_UNSUPPORTED = {
    "include[]": "log-probabilities of tokens beside the text (`include`)",
    "known_speaker_names[]": "telling speakers apart",
    "known_speaker_references[]": "telling speakers apart",
}


class TranslationFields(Struct, kw_only=True):
    """The form of `POST /v1/audio/translations`."""

    file: bytes
    model: str | None = None
    prompt: str | None = None
    response_format: Format | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None


class TranscriptionFields(TranslationFields, kw_only=True):
    """The form of `POST /v1/audio/transcriptions`."""

    language: str | None = None
    stream: bool | None = None
    timestamp_granularities: tuple[Literal["word", "segment"], ...] = field(
        default=(), name="timestamp_granularities[]"
    )
    chunking_strategy: Literal["auto"] | None = None


_FIELDS: dict[Task, frozenset[str]] = {
    "transcribe": frozenset(TranscriptionFields.__struct_encode_fields__),
    "translate": frozenset(TranslationFields.__struct_encode_fields__),
}


class AudioRequest(NamedTuple):
    """What is to be written down, and how."""

    model: ModelCard
    audio: AudioModel | TranscriptionChat
    """How it hears."""
    task: Task
    language: str | None
    """The code of what is spoken; None: the model says it."""
    prompt: str
    """What was said before, or how it should look; empty: nothing."""
    format: Format
    temperature: float
    seed: int | None
    stream: bool
    granularities: tuple[Granularity, ...] = ("segment",)
    """What verbose JSON has times of."""

    @property
    def timed(self) -> bool:
        """Whether times are asked for."""
        return self.format in TIMED


def read_audio_request(fields: Fields, task: Task, model: ModelCard) -> AudioRequest:
    """Raises RequestError 400, and 404 for a model that writes nothing down."""
    _check_names(fields, task)
    audio = model.audio or (None if model.sounds is None else model.sounds.transcription)
    if audio is None:
        raise invalid("model", f"{model.name} does not hear, or writes nothing down but what a chat asks it to")
    if task == "translate" and not (isinstance(audio, AudioModel) and task in dict(audio.tasks)):
        raise unsupported("model", f"translating by {model.name}")
    form = _one(fields, "response_format") or "json"
    if form not in FORMATS:
        raise not_allowed("response_format", form, f"{', '.join(FORMATS)} are")
    if form in TIMED and not isinstance(audio, AudioModel):
        allowed = f"{' and '.join(STREAMED)} are: the model does not say when something is said"
        raise not_allowed("response_format", form, allowed)
    stream = _flag(fields, "stream")
    if stream and form not in STREAMED:
        raise not_allowed("response_format", form, f"with stream {' and '.join(STREAMED)} are")
    granularities = _granularities(fields.get("timestamp_granularities[]", []), form)
    if (strategy := _one(fields, "chunking_strategy")) not in (None, "auto"):
        raise not_allowed("chunking_strategy", strategy, "auto is: sounds are split where they are quiet")
    prompt = _one(fields, "prompt") or ""
    if prompt and (audio.previous if isinstance(audio, AudioModel) else audio.prompt) is None:
        raise unsupported("prompt", f"what was said before, by {model.name}")
    if "<|" in prompt:
        raise invalid("prompt", "<| is not allowed, as special tokens begin with it")
    return AudioRequest(
        model=model,
        audio=audio,
        task=task,
        language=_language(_one(fields, "language"), audio, model),
        prompt=prompt.strip(),
        format=form,  # type: ignore[arg-type]
        temperature=_temperature(_one(fields, "temperature")),
        seed=_seed(_one(fields, "seed")),
        stream=stream,
        granularities=granularities,
    )


def _check_names(fields: Fields, task: Task) -> None:
    for name, values in fields.items():
        if what := _UNSUPPORTED.get(name):
            raise unsupported(name, what)
        if name not in _FIELDS[task]:
            raise RequestError(
                400, f"{name[:80]}: this field is not known", param=name[:80], code="unsupported_parameter"
            )
        if len(values) > 1 and not name.endswith("[]"):
            raise invalid(name, "this field is there twice")


def _granularities(given: list[str], form: str) -> tuple[Granularity, ...]:
    for each in given:
        if each not in ("word", "segment"):
            raise not_allowed("timestamp_granularities[]", each, "word and segment are")
    if given and form != "verbose_json":
        raise not_allowed("response_format", form, "with timestamp_granularities verbose_json is")
    return tuple(given) or ("segment",)  # type: ignore[arg-type]


def _language(code: str | None, audio: AudioModel | TranscriptionChat, model: ModelCard) -> str | None:
    if not code:
        return None
    if isinstance(audio, TranscriptionChat) and not audio.languages:
        raise unsupported("language", f"telling {model.name} what is spoken")
    known = sorted(code for code, _ in audio.languages) or ["en"]
    if code.lower() not in known:
        raise not_allowed("language", code, f"{', '.join(known)} are")
    return code.lower()


def _temperature(text: str | None) -> float:
    if not text:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise not_allowed("temperature", text, "0 to 1 is expected")
    return value


def _seed(text: str | None) -> int | None:
    if not text:
        return None
    if not text.removeprefix("-").isdecimal() or len(text) > len(str(INT64)) or int(text) not in RANGES["seed"]:
        raise not_allowed("seed", text, f"{RANGES['seed']} is expected")
    return int(text) & SEED_MASK


def _flag(fields: Fields, name: str) -> bool:
    text = (_one(fields, name) or "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise not_allowed(name, text, "true or false is expected")
    return text in ("true", "1")


def _one(fields: Fields, name: str) -> str | None:
    values = fields.get(name)
    return values[0] if values else None
