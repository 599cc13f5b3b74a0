"""Vectors, labels and scores of offline prompts: vLLM's parameters and outputs, filled from the gateway's JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from services.offline.errors import InvalidRequest
from services.offline.requests import Prompt, PromptRequest, prompt_requests

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
Output = TypeVar("Output")


class PoolingParams(Struct, frozen=True, kw_only=True):
    """What is made of a prompt, with vLLM's names. The gateway checks the values."""

    use_activation: bool | None = None
    """Whether logits go through the model's activation, or embeddings are normalized; None: as the model has it."""
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    extra: Mapping[str, Any] = {}
    """Any other field of the gateway's endpoint."""

    def fields(self) -> dict[str, Any]:
        """Returns them as fields of a body, without those that are None."""
        given = {name: value for name, value in asdict(self).items() if name != "extra" and value is not None}
        return {**given, **self.extra}


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """What there is of each label of a prompt; `label` is the likeliest one's name."""

    probs: list[float]
    label: str


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """What `/pooling` makes of a prompt: numbers, or numbers for each token."""

    data: list[float] | list[list[float]]


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[Output]):
    """One prompt and what was made of it, with vLLM's field names."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    """None of a pair of texts."""
    num_cached_tokens: int
    finished: bool = True


class PooledKind(NamedTuple):
    """An endpoint, and what its answer is shown as."""

    path: str
    output: Callable[[dict[str, Any]], Any]
    """Of the one element of its `data`."""


EMBEDDING = PooledKind("/v1/embeddings", lambda found: EmbeddingOutput(found["embedding"]))
CLASSIFICATION = PooledKind("/classify", lambda found: ClassificationOutput(found["probs"], found["label"]))
SCORE = PooledKind("/score", lambda found: ScoringOutput(found["score"]))
POOLING = PooledKind("/pooling", lambda found: PoolingOutput(found["data"]))


class PooledCall(NamedTuple):
    """What is asked of a prompt, or of a pair of texts."""

    kind: PooledKind
    body: dict[str, Any]
    """Without the model's name."""
    prompt: str | list[int] | None = None
    """None of a pair."""

    def output(self, answer: dict[str, Any], tokens: list[int]) -> PoolingRequestOutput[Any]:
        """Returns what the gateway's answer says. `tokens`: of the prompt."""
        details = answer["usage"].get("prompt_tokens_details") or {}
        (found,) = answer["data"]
        return PoolingRequestOutput(answer["id"], self.kind.output(found), tokens, details.get("cached_tokens", 0))


def prompt_calls(
    kind: PooledKind,
    prompts: Prompt | Sequence[Prompt],
    params: PoolingParams | Sequence[PoolingParams] | None,
    **more: Any,
) -> list[PooledCall]:
    """Returns one call for each prompt. Raises InvalidRequest."""
    requests = prompt_requests(prompts, None)
    chosen = _params_for(len(requests), params)
    calls = []
    for number, (request, own) in enumerate(zip(requests, chosen, strict=True)):
        prompt = _text_or_ids(request, number)
        rest = {name: value for name, value in request.fields.items() if name != "prompt"}
        given = [prompt] if isinstance(prompt, list) else prompt
        calls.append(PooledCall(kind, {"input": given, **rest, **own.fields(), **more}, prompt))
    return calls


def pair_calls(
    first: str | Sequence[str], second: str | Sequence[str], params: PoolingParams | None
) -> list[PooledCall]:
    """Returns one call for each pair: one text with each of several, or each with its own. Raises InvalidRequest."""
    ones, others = ([each] if isinstance(each, str) else list(each) for each in (first, second))
    if len(ones) not in (1, len(others)):
        allowed = "one, or as many"
        raise InvalidRequest(f"data_1: {len(ones)} texts beside {len(others)} in data_2 are not allowed; {allowed}")
    pairs = zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True)
    own = {} if params is None else params.fields()
    return [PooledCall(SCORE, {"data_1": one, "data_2": other, **own}) for one, other in pairs]


def _params_for(count: int, params: PoolingParams | Sequence[PoolingParams] | None) -> list[PoolingParams]:
    if params is None or isinstance(params, PoolingParams):
        return [params or PoolingParams()] * count
    if len(params) != count:
        what = f"pooling_params: {len(params)} for {count} prompts; one for all, or one for each"
        raise InvalidRequest(what, "pooling_params")
    return list(params)


def _text_or_ids(request: PromptRequest, number: int) -> str | list[int]:
    if request.is_chat or "decoder_prompt" in request.fields:
        raise InvalidRequest(f"prompts[{number}]: text or token ids are allowed", "prompts")
    prompt: str | list[int] = request.fields["prompt"]
    return prompt
