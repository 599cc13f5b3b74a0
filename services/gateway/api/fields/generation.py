"""The fields of a chat and of a completion, and what is checked of them before anything else."""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct

from services.gateway.api.errors import invalid, not_allowed, unsupported
from services.gateway.api.fields.ranges import RANGES
from services.gateway.api.fields.sampling import VllmSamplingFields
from services.gateway.api.structured_outputs import ResponseFormat
from services.gateway.core.beam_search import EarlyStopping
from shared.messages.tokenizer import TruncationSide


class StreamOptionFields(Struct):
    """The fields of OpenAI's `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    resumable: bool | None = None
    include_obfuscation: bool | None = None
    """Not supported: true is refused."""


class CommonFields(VllmSamplingFields, kw_only=True):
    """The JSON fields of both endpoints. Unknown fields are ignored; null means the default."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptionFields | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    enable_prefix_caching: bool | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: TruncationSide | None = None
    request_id: str | None = None
    return_metrics: bool | None = None
    return_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: Any = None
    prompt_embeds: Any = None
    # Of OpenAI's and vLLM's fields those that change no answer.
    prediction: Any = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    mm_payload: str | None = None
    return_mm_kwargs: bool | None = None
    safety_identifier: str | None = None
    session_id: str | None = None
    # Those of which only the value that changes nothing is taken.
    service_tier: str | None = None
    verbosity: str | None = None
    # Not supported. Refused rather than ignored, as the answer would differ from what the client expects.
    ec_transfer_params: Any = None
    guided_whitespace_pattern: Any = None
    logits_processors: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    moderation: Any = None
    return_token_offsets: Any = None


WITHOUT_EFFECT = frozenset(
    {"prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    | {"mm_payload", "return_mm_kwargs", "safety_identifier", "session_id", "user"}
)
"""What clients may send, and no answer depends on."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
}
"""Fields of which only these values are taken, as they change nothing."""
_UNSUPPORTED = {
    "ec_transfer_params": "an encoder's cache",
    "guided_whitespace_pattern": "a pattern for white space",
    "logits_processors": "a logits processor of the client's (vllm_xargs asks for one of the engine's)",
    "media_io_kwargs": "how media are read",
    "moderation": "moderation",
    "repetition_detection": "an end by repetitions",
    "return_token_offsets": "where each token is in the prompt",
    "routed_experts_prompt_start": "which experts each token took",
    "watermarking": "a watermark",
}
_ABSENT: tuple[Any, ...] = (None, False, [], {})
"""Values by which a client asks for nothing. 0 equals False."""
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def check_common_fields(fields: CommonFields, prompts: int, max_choices: int, *, unchecked: str = "") -> None:
    """Raises RequestError 400 for a number out of its range (except the field `unchecked`), for more choices than
    allowed, and for unsupported values."""
    for name, allowed in RANGES.items():
        value = getattr(fields, name, None)
        if value is not None and name != unchecked and value not in allowed:
            raise not_allowed(name, value, f"it must be {allowed}")
    check_processor_settings(fields.mm_processor_kwargs)
    for name, what in _UNSUPPORTED.items():
        if getattr(fields, name) not in _ABSENT:
            raise unsupported(name, what)
    for name, neutral in NEUTRAL.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise not_allowed(name, value, f"{' or '.join(map(repr, neutral))} is")
    check_request_id(fields.request_id)
    if fields.skip_special_tokens is False and fields.spaces_between_special_tokens is False:
        raise unsupported("spaces_between_special_tokens", "taking spaces away from shown special tokens")
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise not_allowed("best_of", fields.best_of, f"only the value of n ({fields.n or 1}) is")
    n = fields.n or 1
    if prompts * n > max_choices:
        what = f"n = {n}" if prompts == 1 else f"{prompts} prompts" + (f" times n = {n}" if n > 1 else "")
        raise invalid(
            "n" if n > 1 else "prompt", f"{what} is not allowed; at most {max_choices} choices in one request"
        )
    if fields.cache_salt is not None and not 1 <= len(fields.cache_salt) <= 256:
        raise invalid("cache_salt", "it must have 1 to 256 characters")


def check_processor_settings(given: Any) -> None:
    """Of `mm_processor_kwargs`, that nothing is asked for but what is done anyhow: sounds within videos are not heard.
    Raises RequestError 400."""
    settings = {"": given} if given and not isinstance(given, dict) else given or {}
    for key, value in settings.items():
        if key != "use_audio_in_video" or value not in (None, False):
            what = "a setting of processors (use_audio_in_video: sounds within videos are not heard; false is allowed)"
            raise unsupported("mm_processor_kwargs", what)


def check_request_id(given: str | None) -> None:
    """Raises RequestError 400 for what cannot be part of an answer's id."""
    if given is not None and not REQUEST_ID.fullmatch(given):
        raise not_allowed("request_id", given, "1 to 128 printable ASCII characters without spaces are")
