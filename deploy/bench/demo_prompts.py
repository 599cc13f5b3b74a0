"""Prompts as the demo model is asked: its own kinds of questions, none of them those its drafters learnt from."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from deploy.demo.examples import Example, Passage
from deploy.demo.mixture import training_examples
from deploy.demo.vocabulary import ASSISTANT, END_OF_TURN, SYSTEM, USER

SEED = 4242


def demo_prompts(tokenizer: Path, count: int) -> list[list[int]]:
    """Token ids, the same every time."""
    encoder = Tokenizer.from_file(str(tokenizer))
    examples = training_examples(SEED)
    return [list(encoder.encode(_text(next(examples)), add_special_tokens=False).ids) for _ in range(count)]


def _text(example: Example) -> str:
    if isinstance(example, Passage):
        return example.prompt
    said = "" if example.system is None else f"{SYSTEM}{example.system}{END_OF_TURN}"
    for turn in example.turns[:-1]:
        said += f"{USER}{turn.question}{END_OF_TURN}{ASSISTANT}{turn.answer}{END_OF_TURN}"
    return f"{said}{USER}{example.turns[-1].question}{END_OF_TURN}{ASSISTANT}"
