"""What `--speculative` says: a JSON object with vLLM's keys, read strictly. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import Struct

from shared.machine.home import expanded

Method = Literal["ngram", "suffix", "draft", "medusa", "eagle", "eagle3", "mtp"]

READ_HIDDEN_STATES: tuple[Method, ...] = ("medusa", "eagle", "eagle3", "mtp")
"""Methods that go on from hidden states of the model."""

DRAFT_TREES: tuple[Method, ...] = ("eagle", "eagle3")
"""Methods that draft trees."""

WITHOUT_MODEL: tuple[Method, ...] = ("ngram", "suffix", "mtp")

MAX_DRAFT_TOKENS = 16
"""Drafts of one step at the most: blocks are reserved for all of them."""
DEFAULT_DRAFT_TOKENS = 3
MAX_EAGLE_TOPK = 8
MAX_TREE_ROWS = 64
"""Rows of a tree at the most, its sequence's last token among them."""


class SpeculationError(ValueError):
    """`--speculative` asks for what cannot be; the text names key, value and what is allowed."""


class SpeculationSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an engine drafts tokens."""

    method: Method
    num_speculative_tokens: int | None = None
    """Drafts of one step at the most; by default 3, and 16 of suffixes, which make as many as they are sure of."""
    model: str | None = None
    """The directory of the draft model, the Medusa heads, EAGLE's layer or EAGLE-3's head. N-grams and suffixes need
    none, and MTP reads the model's own."""
    speculative_eagle_topk: int = 1
    """SGLang's: tokens that may follow one in a tree of drafts; 1: drafts are a chain."""
    speculative_num_draft_tokens: int | None = None
    """SGLang's: rows of a tree at the most, that of the last token among them; by default 1 + topk * drafts of a
    path."""
    speculative_eagle_min_path_prob: float = 0.05
    """How likely a path of a tree must be, as the head sees it, to be verified."""
    prompt_lookup_max: int = 5
    """Tokens of the longest match looked for."""
    prompt_lookup_min: int = 2
    """Tokens that a match must have."""
    suffix_decoding_max_tree_depth: int = 24
    """Tokens of the longest match looked for."""
    suffix_decoding_max_cached_requests: int = 10_000
    """Answers that are looked through beside the sequence itself, the latest."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Drafts at the most for each token that matches."""
    suffix_decoding_min_token_prob: float = 0.1
    """The share of the places where the last tokens occurred that a draft must have followed at."""

    @property
    def most(self) -> int:
        """Drafts of one step and sequence at the most."""
        return self.num_speculative_tokens or (MAX_DRAFT_TOKENS if self.method == "suffix" else DEFAULT_DRAFT_TOKENS)

    @property
    def tree_rows(self) -> int:
        """Rows of a tree at the most, that of the last token among them."""
        return self.speculative_num_draft_tokens or min(MAX_TREE_ROWS, 1 + self.speculative_eagle_topk * self.most)

    def folder(self) -> Path:
        """The directory of the method's weights, `~` resolved. Only for methods that have weights."""
        assert self.model is not None, "checked when it was read"
        return expanded(self.model)


def check_supported(settings: SpeculationSettings, *, device: str, stages: int) -> None:
    """Raises SpeculationError where `device` drafts nothing, or the method does not go with so many pipeline stages."""
    if device == "sim":
        raise SpeculationError("speculative: the simulated device drafts nothing; see sim_speculate")
    if (topk := settings.speculative_eagle_topk) > 1 and device not in ("", "auto", "cpu"):
        raise SpeculationError(
            f"speculative: speculative_eagle_topk is {topk}, must be 1 on {device}: trees need a CPU"
        )
    if stages > 1 and settings.method != "ngram":
        # The stages before the last need the drafts when they begin, and only the last one could make them.
        raise SpeculationError(f"speculative: method {settings.method} does not go with pipeline stages; ngram does")


def read_speculation(text: str) -> SpeculationSettings:
    """The settings in `text`, a JSON object. Raises SpeculationError."""
    try:
        settings = msgspec.json.decode(text, type=SpeculationSettings)
    except msgspec.MsgspecError as error:
        raise SpeculationError(f"speculative: {error}; {_allowed()}") from None
    complaint = _complaint(settings)
    if complaint is not None:
        raise SpeculationError(f"speculative: {complaint}")
    return settings


def _complaint(settings: SpeculationSettings) -> str | None:
    most = settings.num_speculative_tokens
    if most is not None and not 1 <= most <= MAX_DRAFT_TOKENS:
        return f"num_speculative_tokens is {most}, must be from 1 to {MAX_DRAFT_TOKENS}"
    if settings.method in WITHOUT_MODEL and settings.model is not None:
        return f"model is {settings.model!r}, but method {settings.method} has none"
    if (wrong := _foreign(settings) or _tree_complaint(settings)) is not None:
        return wrong
    if settings.method == "suffix":
        return _suffix_complaint(settings)
    if settings.method == "ngram":
        if not 1 <= settings.prompt_lookup_min <= settings.prompt_lookup_max <= 64:
            return (
                f"prompt_lookup_min is {settings.prompt_lookup_min}, prompt_lookup_max {settings.prompt_lookup_max}: "
                "must be from 1 to 64, and the first not above the other"
            )
    elif not settings.model and settings.method not in WITHOUT_MODEL:
        return f"method {settings.method} needs model, the directory of its weights"
    return None


def _foreign(settings: SpeculationSettings) -> str | None:
    """A key that has no effect on the method."""
    for method, prefix in (("ngram", "prompt_lookup_"), ("suffix", "suffix_decoding_")):
        for field in msgspec.structs.fields(SpeculationSettings):
            if not field.name.startswith(prefix) or method == settings.method:
                continue
            if (value := getattr(settings, field.name)) != field.default:
                return f"{field.name} is {value}, which only method {method} has"
    return None


def _tree_complaint(settings: SpeculationSettings) -> str | None:
    topk, rows, least = settings.speculative_eagle_topk, settings.speculative_num_draft_tokens, settings.most + 1
    if not 1 <= topk <= MAX_EAGLE_TOPK:
        return f"speculative_eagle_topk is {topk}, must be from 1 to {MAX_EAGLE_TOPK}"
    if topk > 1 and settings.method not in DRAFT_TREES:
        return f"speculative_eagle_topk is {topk}, which only methods {', '.join(DRAFT_TREES)} have"
    if not 0.0 <= (least_prob := settings.speculative_eagle_min_path_prob) <= 1.0:
        return f"speculative_eagle_min_path_prob is {least_prob}, must be from 0.0 to 1.0"
    if rows is not None and topk == 1:
        return f"speculative_num_draft_tokens is {rows}, which only trees have: speculative_eagle_topk above 1"
    if rows is not None and not least <= rows <= MAX_TREE_ROWS:
        return (
            f"speculative_num_draft_tokens is {rows}, must be from {least}, a path of num_speculative_tokens and the "
            f"last token, to {MAX_TREE_ROWS}"
        )
    return None


def _suffix_complaint(settings: SpeculationSettings) -> str | None:
    for name, least, most in (
        ("max_tree_depth", 1, 64),
        ("max_cached_requests", 0, 1_000_000),
        ("max_spec_factor", 0.0, 16.0),
        ("min_token_prob", 0.0, 1.0),
    ):
        value = getattr(settings, f"suffix_decoding_{name}")
        if not least <= value <= most:
            return f"suffix_decoding_{name} is {value}, must be from {least} to {most}"
    return None


def _allowed() -> str:
    keys = ", ".join(field.name for field in msgspec.structs.fields(SpeculationSettings))
    methods = ", ".join(get_args(Method))
    return f'a JSON object such as {{"method": "ngram"}} is wanted; method is one of {methods}; the keys are {keys}'
