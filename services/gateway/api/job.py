"""What a generation request comes to once it is understood: which sequences to generate, and how to answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from services.gateway.api.structured import Guided
from services.gateway.parsing.output_parser import Parsing
from shared.dialects import THINKING_MARKS
from shared.ids import ModelName
from shared.messages.generation import SamplingParams, StopParams
from shared.messages.lifecycle import ModelCard
from shared.messages.tokenizer import Prompt

SEED_MASK = 2**63 - 1


class Limits(Struct, frozen=True, kw_only=True):
    """What a single request may ask for at the most."""

    max_choices: int = 128
    """Sequences: prompts × n."""
    max_stop: int = 16
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 256
    max_logit_bias: int = 1024
    max_logprobs: int = 20
    max_logprob_token_ids: int = 128
    max_bad_words: int = 128
    max_bad_word_chars: int = 256
    max_beams: int = 16
    allow_request_template: bool = False


class StreamOptions(NamedTuple):
    include_usage: bool
    continuous_usage: bool


EarlyStopping = bool | Literal["never"]


class Beams(NamedTuple):
    """How to search for the likeliest outputs. The width is the request's n."""

    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False


class Telling(NamedTuple):
    """What an answer tells beside its text."""

    logprobs: bool = False
    prompt_logprobs: int | None = None
    """For each token of the prompt, its log-probability and those of so many most likely ones."""
    echo_logprobs: int | None = None
    """The same among the log-probabilities of the output, as the prompt is among its text."""
    token_ids: bool = False
    tokens_as_ids: bool = False
    """Tokens among log-probabilities are named `token_id:…`."""


TEXT_ONLY = Telling()


class Choice(NamedTuple):
    """One sequence to generate. `place` is its index in the answer."""

    place: int
    prompt: Prompt
    sampling: SamplingParams


class Job(Struct, frozen=True, kw_only=True):
    """One generation request, checked."""

    kind: Literal["chat", "completion"]
    model: ModelCard
    prompts: tuple[Prompt, ...]
    n: int
    seed: int | None
    """The client's; None: one is drawn for each choice."""
    sampling: SamplingParams
    stopping: StopParams
    stream: StreamOptions | None
    """None: one body at the end."""
    echo: bool = False
    only_echo: bool = False
    """The client wants no output; one token is generated, as an engine cannot do with less."""
    telling: Telling = TEXT_ONLY
    bad_words: tuple[str, ...] = ()
    truncate_prompt_tokens: int | None = None
    beams: Beams | None = None
    """The choices of a prompt are the best hypotheses of a beam search, not draws."""
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    guided: Guided | None = None
    """What the output must match."""
    parsing: Parsing | None = None
    """How a chat's output is taken apart; None: it is text and nothing else."""

    @property
    def name(self) -> ModelName:
        return self.model.name

    @property
    def size(self) -> int:
        return len(self.prompts) * self.n

    @property
    def thinking_end(self) -> str:
        """The mark behind thoughts; empty where none are looked for."""
        reasoning = None if self.parsing is None else self.parsing.dialect.reasoning
        return "" if reasoning is None else THINKING_MARKS[reasoning].end

    def choices(self, drawn: int) -> Iterator[Choice]:
        """Every sequence. `drawn` is a random seed for where the client gave none; choices of a prompt differ."""
        base = drawn if self.seed is None else self.seed
        for number, prompt in enumerate(self.prompts):
            for i in range(self.n):
                offset = i if self.seed is not None else number * self.n + i
                sampling = replace(self.sampling, seed=(base + offset) & SEED_MASK)
                if i and self.stream is None:  # one of them tells what the prompt's log-probabilities are
                    sampling = replace(sampling, prompt_logprobs=None)
                yield Choice(number * self.n + i, prompt, sampling)
