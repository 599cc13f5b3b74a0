"""Whether and where a request was moved to another detokenizer in the middle of it does not show in its text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.core.detokenizer import Detokenizer
from services.detokenizer.core.vocabularies import text_vocabulary
from shared.ids import Attempt, DetokenizerId, EngineId, GatewayId, Incarnation, ModelName, RequestId
from shared.messages.detokenizer import NewTokens, OpenStream, TokenBatch
from shared.messages.gateway import Deltas
from shared.models.tokenizer_files import special_ids
from shared.packing import pack
from tests.support.models import tiny_tokenizers

TOKENIZERS = {
    "byte-level": tiny_tokenizers.byte_level(),
    "llama": tiny_tokenizers.byte_fallback(strip=True),
    "wordpiece": tiny_tokenizers.wordpiece(),
}
VOCABULARIES = {name: text_vocabulary(t, special_ids(t)) for name, t in TOKENIZERS.items()}
R = RequestId("r")


class Client:
    """What a gateway keeps of a request: its text, its tokens, how it ended."""

    def __init__(self, kind: str, prompt: list[int], options: dict[str, Any]) -> None:
        self._kind, self._prompt, self._options = kind, prompt, options
        self.text = ""
        self.tokens: list[int] = []
        self.end: tuple[str, Any] | None = None

    def attempt(self, number: int, output: list[int], *, last: bool) -> None:
        """Dispatches the request (again); `output` are the tokens that this attempt adds before it breaks off."""
        core = Detokenizer(DetokenizerId("d"), Incarnation(number), ModelName("m"), VOCABULARIES[self._kind])
        self._hear(core, 0, opened=(self._opened(number),))
        start = len(self.tokens)
        for index, token in enumerate(output):
            self._hear(core, index + 1, entries=(NewTokens(R, Attempt(number), start + index, (token,)),))
        if last:
            end = NewTokens(R, Attempt(number), start + len(output), (), "length")
            self._hear(core, len(output) + 1, entries=(end,))

    def _opened(self, number: int) -> OpenStream:
        return OpenStream(
            request=R,
            attempt=Attempt(number),
            gateway=GatewayId("g"),
            model=ModelName("m"),
            context=pack([*self._prompt[-8:], *self.tokens]),
            resumed=len(self.tokens),
            sent_chars=len(self.text),
            prompt_tokens=len(self._prompt),
            cached_tokens=0,
            **self._options,
        )

    def _hear(self, core: Detokenizer, number: int, **parts: Any) -> None:
        batch = TokenBatch(engine=EngineId("e"), epoch=Incarnation(1), number=number, **parts)
        for action in core.handle(batch):
            if isinstance(action.message, Deltas):
                for delta in action.message.deltas:
                    assert self.end is None
                    assert delta.position == len(self.tokens)
                    self.text += delta.text
                    self.tokens += delta.tokens
                    self.end = delta.finish and (delta.finish, delta.stop_reason)


def served(kind: str, prompt: list[int], output: list[int], cuts: list[int], options: dict[str, Any]) -> Client:
    client = Client(kind, prompt, options)
    borders = [*sorted(min(cut, len(output)) for cut in cuts), len(output)]
    for number, border in enumerate(borders, start=1):
        if client.end is None:
            client.attempt(number, output[len(client.tokens) : border], last=number == len(borders))
    return client


OPTIONS = st.fixed_dictionaries(
    {
        "stop": st.lists(st.sampled_from(["ab", "bc", "b", " ", "he", "é", "\n", "😀!", "zzz"]), max_size=3).map(tuple),
        "include_stop": st.booleans(),
        "min_tokens": st.integers(0, 6),
        "skip_special_tokens": st.booleans(),
    }
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(
    prompt=st.lists(st.integers(0, 2**20), min_size=1, max_size=12),
    words=st.lists(st.sampled_from(["ab", "c", " the", "é", "😀", "!", "\n", "b", "</s>", "世"]), max_size=8),
    noise=st.lists(st.integers(0, 2**20), max_size=6),
    cuts=st.lists(st.integers(0, 30), max_size=3),
    options=OPTIONS,
)
def test_a_request_in_several_attempts_reads_as_one_in_a_single_attempt(
    kind: str, prompt: list[int], words: list[str], noise: list[int], cuts: list[int], options: dict[str, Any]
) -> None:
    tokenizer = TOKENIZERS[kind]
    size = tokenizer.get_vocab_size()
    output = tokenizer.encode("".join(words), add_special_tokens=False).ids + [n % size for n in noise]
    context = [n % size for n in prompt]
    one = served(kind, context, output, [], options)
    several = served(kind, context, output, cuts, options)
    assert (several.text, several.tokens, several.end) == (one.text, one.tokens, one.end)
    assert one.end is not None
