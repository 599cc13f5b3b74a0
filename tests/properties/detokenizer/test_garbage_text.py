"""Whatever decodes as a message harms neither a tokenizer nor a detokenizer: it is served, refused or counted."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.core.detokenizer import Detokenizer
from services.detokenizer.core.vocabularies import text_vocabulary
from services.tokenizer.core.chat_template import ChatTemplate
from services.tokenizer.core.refusal import PromptRefused
from shared.bus.codec import decode, encode
from shared.ids import DetokenizerId, Incarnation, ModelName, RequestId
from shared.messages.detokenizer import TokenBatch
from shared.messages.tokenizer import ChatPrompt
from shared.models.tokenizer_files import special_ids
from shared.packing import pack
from tests.support.models import tiny_tokenizers
from tests.support.paths import CHAT_TEMPLATES

TOKENIZERS = {
    "byte_level": tiny_tokenizers.byte_level(),
    "llama": tiny_tokenizers.byte_fallback(strip=True),
    "wordpiece": tiny_tokenizers.wordpiece(),
}
VOCABULARIES = {kind: text_vocabulary(t, special_ids(t)) for kind, t in TOKENIZERS.items()}
FAMILIES = [path.stem for path in CHAT_TEMPLATES.glob("*.jinja")]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("text") | JSON, "text": st.text(max_size=5) | JSON}), max_size=2
)
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": JSON, "arguments": JSON})} | {"id": JSON}),
    max_size=2,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | JSON},
    optional={"content": st.text(max_size=8) | PARTS | JSON, "tool_calls": CALLS | JSON, "reasoning": JSON},
)
TOOLS = st.lists(st.fixed_dictionaries({"function": st.dictionaries(st.text(max_size=4), JSON, max_size=2) | JSON}))


@cache
def template(family: str) -> ChatTemplate:
    return ChatTemplate((CHAT_TEMPLATES / f"{family}.jinja").read_text())


def refused_field(prompt: ChatPrompt, family: str) -> str | None:
    try:
        text = template(family).render(prompt, {"bos_token": "<s>", "eos_token": "</s>"})
    except PromptRefused as refused:
        return refused.field
    assert isinstance(text, str)
    return None


@settings(max_examples=100, deadline=None)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    messages=st.lists(MESSAGE, max_size=4) | JSON,
    tools=st.none() | TOOLS | JSON,
    kwargs=st.dictionaries(
        st.sampled_from(
            ["enable_thinking", "documents", "builtin_tools", "date_string", "messages", "self", "x-y", ""]
        ),
        JSON,
        max_size=2,
    ),
    continued=st.booleans(),
)
def test_any_chat_is_rendered_or_refused(
    family: str, messages: Any, tools: Any, kwargs: dict[str, Any], continued: bool
) -> None:
    prompt = ChatPrompt(
        messages=json.dumps(messages).encode(),
        tools=None if tools is None else json.dumps(tools).encode(),
        add_generation_prompt=not continued,
        continue_final_message=continued,
        template_kwargs=kwargs,
    )
    assert refused_field(prompt, family) in (None, "messages", "tools", "chat_template_kwargs")


@given(messages=st.binary(max_size=40))
def test_any_bytes_for_messages_are_refused(messages: bytes) -> None:
    assert refused_field(ChatPrompt(messages=messages), "chatml") == "messages"


SMALL = st.integers(0, 4)
OFFSET = st.integers(-2, 4)
TOKEN = st.integers(0, 700) | st.integers(0, 2**32 - 1)
REQUEST = st.sampled_from(["r", "s"])
ATTEMPT = st.just(1) | SMALL
LOGPROBS = st.none() | st.lists(
    st.tuples(TOKEN, st.floats(allow_nan=False), st.lists(st.tuples(TOKEN, st.just(-1.0)), max_size=2)), max_size=3
)
OPENED = st.tuples(
    REQUEST,
    ATTEMPT,
    st.sampled_from(["g", "h"]),
    st.sampled_from(["m", "m", "m", "other"]),
    st.just(pack([1, 2, 3])) | st.binary(max_size=16),
    st.just(0) | SMALL,
    st.just(0) | SMALL,
    SMALL,
    SMALL,
    st.lists(st.text(max_size=2), max_size=2),
    st.booleans(),
    SMALL,
    st.booleans(),
)
ENTRY = st.tuples(
    REQUEST,
    ATTEMPT,
    st.just(0) | OFFSET,  # from where the stream is
    st.lists(TOKEN, max_size=3),
    st.sampled_from([None, None, None, "stop", "length"]),
    st.none() | TOKEN,
    LOGPROBS,
)
BATCH = st.tuples(
    st.just(0) | OFFSET,  # from the number that is expected
    st.lists(OPENED, max_size=2),
    st.lists(ENTRY, max_size=3),
    st.lists(st.tuples(REQUEST, SMALL), max_size=1),
)


@settings(max_examples=100, deadline=None)
@given(batches=st.lists(BATCH, max_size=8), kind=st.sampled_from(["byte_level", "llama", "wordpiece"]))
def test_any_token_batches_are_answered_with_messages_that_can_be_sent(batches: list[Any], kind: str) -> None:
    core = Detokenizer(DetokenizerId("d"), Incarnation(1), ModelName("m"), VOCABULARIES[kind])
    number = 0
    for offset, opened, entries, abandoned in batches:
        placed = [(r, a, max(0, at + _position(core, r)), *rest) for r, a, at, *rest in entries]
        batch = decode(encode(("e", 1, max(0, number + offset), opened, placed, abandoned)), TokenBatch)
        number = batch.number + 1
        for action in core.handle(batch):
            encode(action.message)


def _position(core: Detokenizer, request: str) -> int:
    stream = core.streams.get(RequestId(request))
    return stream.position if stream is not None else 0
