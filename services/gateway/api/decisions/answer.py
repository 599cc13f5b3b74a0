"""The answer of `/v1/decisions`, made of how likely the letters of the options are."""

from __future__ import annotations

import math
from typing import Any

from services.gateway.api.decisions.questions import ChoiceQuestion, Predicate, Question, ScoreQuestion, options
from services.gateway.api.logprobs import logprobs_by_id
from services.gateway.api.response import ChoiceState, ResponseHeader, usage


def decisions_answer(
    header: ResponseHeader,
    choices: list[ChoiceState],
    questions: tuple[Question, ...],
    letters: tuple[tuple[int, ...], ...],
) -> dict[str, Any]:
    """Returns the body. `letters`: the token ids of each option's letter, in their order."""
    answers = []
    for question, choice in zip(questions, choices, strict=True):
        [position] = choice.logprobs
        found = logprobs_by_id(position)
        answers.append(
            _answer(question, [_sum([found[token] for token in each]) for each in letters[: options(question)]])
        )
    return {"model": header.model, "answers": answers, "usage": _usage(choices)}


def _answer(question: Question, logprobs: list[float]) -> dict[str, Any]:
    """`logprobs`: of each option's letter, among all tokens."""
    shares = _shares(logprobs)
    likeliest = max(range(len(shares)), key=shares.__getitem__)
    # Where the model would rather say something else than any letter, that is low, as in vLLM.
    confidence = math.exp(logprobs[likeliest])
    match question:
        case Predicate(name=name):
            return {"type": "predicate", "name": name, "probability": shares[1]}
        case ChoiceQuestion(name=name, choices=choices):
            listed: list[dict[str, Any]] = [
                {"value": each.value, "probability": share} for each, share in zip(choices, shares, strict=True)
            ]
            picked = {"choice": choices[likeliest].value, "probabilities": listed, "confidence": confidence}
            return {"type": "choice", "name": name, **picked}
        case ScoreQuestion(name=name, levels=levels):
            listed = [
                {"value": i, "label": each.label, "probability": share}
                for i, (each, share) in enumerate(zip(levels, shares, strict=True))
            ]
            score = sum(i * share for i, share in enumerate(shares))
            return {"type": "score", "name": name, "score": score, "probabilities": listed, "confidence": confidence}


def _sum(logprobs: list[float]) -> float:
    """The logarithm of what their probabilities make together."""
    most = max(logprobs)
    return most + math.log(sum(math.exp(each - most) for each in logprobs))


def _shares(logprobs: list[float]) -> list[float]:
    """Probabilities among these alone."""
    most = max(logprobs)
    weights = [math.exp(each - most) for each in logprobs]
    return [weight / sum(weights) for weight in weights]


def _usage(choices: list[ChoiceState]) -> dict[str, Any]:
    """In the words of the Responses API."""
    counts = usage(choices)
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }
