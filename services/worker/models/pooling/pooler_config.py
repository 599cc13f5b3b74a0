"""How prompts become vectors, as settings say it: each setting by itself, or vLLM's JSON `--pooler-config` for all. No
torch."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct

from shared.packing import NOT_DECODED

PoolingChoice = Literal["auto", "none", "last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean", "step"]
"""auto: what the checkpoint says; where it says nothing it makes no vectors, as with none."""

_CHOICES: dict[str, PoolingChoice] = {each.upper(): each for each in get_args(PoolingChoice)}
_ALL, _BY_TOKENS = "ALL", ("STEP",)
_OF_A_PROMPT = tuple(each for each in _CHOICES if each not in ("AUTO", "NONE", *_BY_TOKENS))


_SETTINGS = {
    "pooling_type": "pooling_type",
    "step_tag_id": "pooling_step_tag_id",
    "returned_token_ids": "pooling_returned_token_ids",
}
"""By a field of `PoolerSettings` and key of vLLM's JSON: the setting that says it by itself."""


class PoolerSettings(NamedTuple):
    """What settings say of vectors; what they leave out, the checkpoint says."""

    pooling_type: PoolingChoice = "auto"
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] = ()
    normalize: bool | None = None
    """Whether embeddings are normalized where a request does not say."""
    use_activation: bool | None = None
    """The same, and whether a classifier's logits go through its activation."""
    all_tokens: bool = False
    """Whether the model has to be one that gives every token labels, as vLLM's type ALL says."""


class _PoolerConfig(Struct, forbid_unknown_fields=True, kw_only=True):
    """The keys of vLLM's `PoolerConfig` that have a meaning here; `softmax` and `activation` are older names."""

    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None


def pooler_settings(text: str | None, single: PoolerSettings) -> PoolerSettings:
    """What `--pooler-config` and the settings of their own, `single`, say together. Raises ValueError for what is no
    such JSON, and for what both say."""
    if text is None:
        return single
    try:
        said = msgspec.json.decode(text, type=_PoolerConfig)
    except NOT_DECODED as error:
        known = ", ".join(_PoolerConfig.__struct_fields__)
        raise ValueError(f"pooler_config = {text}: {error}; known are {known}") from None
    activations = ("use_activation", "softmax", "activation")
    read = PoolerSettings(
        _pooling_type(said),
        said.step_tag_id,
        said.returned_token_ids or (),
        said.normalize,
        None if (name := _given(said, *activations)) is None else getattr(said, name),
        all_tokens=_ALL in ((said.pooling_type or "").upper(), (said.tok_pooling_type or "").upper()),
    )
    unset = PoolerSettings()
    own = {field: value for field, value in single._asdict().items() if value != getattr(unset, field)}
    for field in own:
        if getattr(read, field) != getattr(unset, field):
            raise ValueError(f"{_SETTINGS[field]}: pooler_config says {field}, too; give one of them")
    return read._replace(**own)


def _pooling_type(said: _PoolerConfig) -> PoolingChoice:
    name = _given(said, "pooling_type", "seq_pooling_type", "tok_pooling_type")
    if name is None:
        return "auto"
    given: str = getattr(said, name)
    if given.upper() == _ALL and name != "seq_pooling_type":
        return "auto"
    allowed = {"pooling_type": _OF_A_PROMPT + _BY_TOKENS, "seq_pooling_type": _OF_A_PROMPT}.get(name, _BY_TOKENS)
    if given.upper() not in allowed:
        raise ValueError(f"pooler_config: {name} {given} is not allowed; {', '.join(allowed)} are")
    return _CHOICES[given.upper()]


def _given(said: _PoolerConfig, *names: str) -> str | None:
    """The one of these keys that is there. Raises ValueError for more of them: they say the same."""
    found = [name for name in names if getattr(said, name) is not None]
    if len(found) > 1:
        raise ValueError(f"pooler_config: {' and '.join(found)} say the same; give one of them")
    return found[0] if found else None
