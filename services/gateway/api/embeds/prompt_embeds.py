"""`prompt_embeds`: prompts of completions, and parts of a chat's messages, given as rows of embeddings; and what cannot
be had of them."""

from __future__ import annotations

import binascii
from typing import Any, get_args

from services.gateway.api.embeds.images import read_foreign_image, read_media
from services.gateway.api.embeds.saved_tensor import NoSavedTensor, SavedTensor, read_saved_tensor
from services.gateway.api.errors import RequestError, invalid, not_allowed
from services.gateway.api.fields.generation import CommonFields
from services.gateway.api.generation import RequestLimits
from services.gateway.api.media.source import IMAGE, MEDIA, SOUND, VIDEO, MediaKind, MediaSource
from shared.messages.generation import EMBEDDING_BYTES, MAX_PROMPT_EMBEDS_BYTES, EmbeddingDtype, PromptEmbeds
from shared.messages.model_card import ModelCard
from shared.messages.tokenizer import EmbedsPrompt, embeds_placeholder

FIELD = "prompt_embeds"
MAX_ENCODED = (MAX_PROMPT_EMBEDS_BYTES + 64 * 2**10) * 4 // 3
"""Characters of one prompt in base64, with what the archive has around it."""
MAX_MAGNITUDE = 65504
"""The largest finite number of float16, so that an element is a number in whatever dtype a model has."""
NEEDS_TOKENS = (
    *("echo", "prompt_logprobs", "truncate_prompt_tokens", "use_beam_search", "return_token_ids"),
    *("return_prompt_text", "vllm_xargs"),
)
"""Fields that ask for the prompt's tokens, or whose effect depends on them."""

_TOO_LARGE: dict[EmbeddingDtype, tuple[int, int]] = {
    "float32": (0x7FFFFFFF, 0x80000000 - 0x477FE001),
    "bfloat16": (0x7FFF, 0x8000 - 0x4780),
    "float16": (0x7FFF, 0x8000 - 0x7C00),
}
"""The bits of a number without its sign, and what carries those above MAX_MAGNITUDE, infinity and NaN into the sign."""


def embedded_prompts(fields: CommonFields, card: ModelCard) -> tuple[EmbedsPrompt, ...]:
    """The prompts of `prompt_embeds`, which is set. Raises RequestError 400."""
    given, size = fields.prompt_embeds, _size(card, FIELD)
    check_needs_no_tokens(fields)
    if isinstance(given, str):
        return (EmbedsPrompt(_rows(FIELD, given, size)),)
    if not isinstance(given, list) or not given or not all(isinstance(each, str) for each in given):
        raise not_allowed(FIELD, given, "a tensor of torch.save in base64, or a list of these, is")
    return tuple(EmbedsPrompt(_rows(f"{FIELD}[{i}]", each, size)) for i, each in enumerate(given))


IMAGES_HAVE_TOKENS = ("return_token_ids", "return_prompt_text")
"""Of these what can be had of images: their token, as often as they have rows."""


def check_needs_no_tokens(fields: CommonFields, *, only_media: str | None = None) -> None:
    """Raises RequestError 400 where some field asks for the tokens of a prompt that has embeddings. `only_media`: what
    these are all of, images or videos; None: some are a client's own."""
    what = only_media or FIELD
    for name in NEEDS_TOKENS:
        if only_media and name in IMAGES_HAVE_TOKENS:
            continue
        if (value := getattr(fields, name, None)) is not None and value is not False:
            raise invalid(name, f"not allowed together with {what}, which have no tokens")
    if fields.repetition_penalty not in (None, 1.0):
        raise not_allowed("repetition_penalty", fields.repetition_penalty, f"with {what} only 1 is")


class EmbeddedParts:
    """Owns the rows of a chat's parts of type prompt_embeds, its images and videos, in the order of its messages."""

    def __init__(self, card: ModelCard, limits: RequestLimits) -> None:
        self._card, self._limits = card, limits
        self.found: list[PromptEmbeds] = []
        """Of an image or a video, no rows yet."""
        self.media: list[MediaSource] = []

    def numbers(self, kind: MediaKind) -> tuple[int, ...]:
        """Which of those found are of this kind."""
        return tuple(each.number for each in self.media if each.kind == kind)

    def check_fields(self, fields: CommonFields) -> None:
        """Raises RequestError 400 where some field asks for tokens that these parts have none of."""
        nouns = " and ".join(f"{kind.noun}s" for kind in MEDIA if self.numbers(kind))
        check_needs_no_tokens(fields, only_media=nouns if len(self.media) == len(self.found) else None)

    def read(self, part: dict[str, Any], path: str) -> dict[str, str]:
        """Reads one of them, `{"type": "prompt_embeds", "data": …}`, an image, a video or a sound: the part that stands
        for it in the messages. Raises RequestError 400."""
        for kind in MEDIA:
            if part["type"] in (kind.part, kind.url_part):
                source = read_media(kind, part, path, len(self.found), self._card, self._limits)
                return self._add(source, f"{path}.type")
        return {"type": "text", "text": self._read_rows(part, path)}

    def read_foreign(self, part: dict[str, Any], path: str) -> dict[str, str]:
        """Reads an image of another API than OpenAI's chats, see `foreign_image`. Raises RequestError 400."""
        image = read_foreign_image(part, len(self.found), self._card, self._limits)
        return self._add(image, image.field)

    def _add(self, source: MediaSource, field: str) -> dict[str, str]:
        kind = source.kind
        limits = self._limits
        most = {IMAGE: limits.max_images, VIDEO: limits.max_videos, SOUND: limits.max_sounds}[kind]
        if len(self.numbers(kind)) >= most:
            raise invalid(field, f"more than {most} {kind.noun}s are not allowed in one chat")
        self.media.append(source)
        self.found.append(PromptEmbeds(dtype="float32", size=1, rows=b""))
        return {"type": kind.shown}

    def _read_rows(self, part: dict[str, Any], path: str) -> str:
        size, name = _size(self._card, f"{path}.type"), f"{path}.data"
        data = part.get("data")
        if not isinstance(data, str):
            raise not_allowed(name, data, "a tensor of torch.save in base64 is")
        rows = _rows(name, data, size)
        others = [each.dtype for each in self.found if each.rows]
        if others and rows.dtype != others[0]:
            raise invalid(name, f"dtype {rows.dtype} is not allowed beside {others[0]} in one chat")
        self.found.append(rows)
        if (total := sum(len(each.rows) for each in self.found)) > MAX_PROMPT_EMBEDS_BYTES:
            raise invalid(name, f"{total} bytes of rows are not allowed in one chat; {MAX_PROMPT_EMBEDS_BYTES} are")
        return embeds_placeholder(len(self.found) - 1)


def _size(card: ModelCard, name: str) -> int:
    """Elements of a row. Raises RequestError 400 for a model that takes none."""
    if card.prompt_embeds is None:
        reason = f"{card.name} takes no {FIELD}; its engines have to be started with --enable-prompt-embeds"
        raise RequestError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")
    return card.prompt_embeds


def _rows(name: str, encoded: str, size: int) -> PromptEmbeds:
    """`size`: elements of a row. Raises RequestError 400."""
    if len(encoded) > MAX_ENCODED:
        most = f"at most {MAX_PROMPT_EMBEDS_BYTES} bytes of rows are allowed in one prompt"
        raise invalid(name, f"{len(encoded)} characters; {most}")
    try:
        saved = read_saved_tensor(binascii.a2b_base64(encoded.encode("ascii"), strict_mode=True))
    except (binascii.Error, UnicodeEncodeError):
        raise not_allowed(name, encoded, "base64 of what torch.save wrote is") from None
    except NoSavedTensor as error:
        raise invalid(name, f"not a tensor that torch.save wrote: {error}") from None
    return _checked(name, saved, size)


def _checked(name: str, saved: SavedTensor, size: int) -> PromptEmbeds:
    shape = saved.shape[1:] if len(saved.shape) == 3 and saved.shape[0] == 1 else saved.shape
    dtype: Any = saved.dtype
    if dtype not in get_args(EmbeddingDtype):
        raise invalid(name, f"dtype {dtype} is not allowed; {', '.join(get_args(EmbeddingDtype))} are")
    if len(shape) != 2 or not shape[0] or shape[1] != size:
        allowed = f"[tokens, {size}] is, with one token at least"
        raise invalid(name, f"shape {list(saved.shape)} is not allowed; {allowed}")
    if len(saved.data) > MAX_PROMPT_EMBEDS_BYTES:
        most = f"{MAX_PROMPT_EMBEDS_BYTES} are, {MAX_PROMPT_EMBEDS_BYTES // (len(saved.data) // shape[0])} tokens"
        raise invalid(name, f"{len(saved.data)} bytes of rows are not allowed in one prompt; {most}")
    if has_undefined(dtype, saved.data):
        raise invalid(name, f"NaN, infinity and numbers beyond ±{MAX_MAGNITUDE} are not allowed")
    return PromptEmbeds(dtype=dtype, size=size, rows=saved.data)


def has_undefined(dtype: EmbeddingDtype, data: bytes) -> bool:
    """Whether some number is NaN, infinite, or beyond MAX_MAGNITUDE. All are looked at at once, as one long integer."""
    bytes_each = EMBEDDING_BYTES[dtype]
    count = len(data) // bytes_each
    magnitude, carry = (
        int.from_bytes(pattern.to_bytes(bytes_each, "little") * count, "little") for pattern in _TOO_LARGE[dtype]
    )
    sign = int.from_bytes((1 << 8 * bytes_each - 1).to_bytes(bytes_each, "little") * count, "little")
    return bool(((int.from_bytes(data, "little") & magnitude) + carry) & sign)
