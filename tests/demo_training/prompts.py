"""The prompts in `deploy/demo/prompts.jsonl`: `python -m tests.demo_training.prompts` writes them.

They are of the demo model's own kinds of questions, and none of those that its drafters learnt from.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tests.demo_training.examples import Example, Passage
from tests.demo_training.mixture import training_examples
from tests.demo_training.vocabulary import ASSISTANT, END_OF_TURN, SYSTEM, USER
from tests.support.paths import DEMO

SEED = 4242
COUNT = 720
FILE = DEMO / "prompts.jsonl"


def prompts() -> Iterator[str]:
    """With the chat template's markers, the same every time."""
    for _, example in zip(range(COUNT), training_examples(SEED), strict=False):
        yield text_of(example)


def written() -> bytes:
    """What the file holds: a JSON object a line."""
    return b"".join(msgspec.json.encode({"prompt": prompt}) + b"\n" for prompt in prompts())


def text_of(example: Example) -> str:
    """What the model is to continue, with the chat template's markers."""
    if isinstance(example, Passage):
        return example.prompt
    said = "" if example.system is None else f"{SYSTEM}{example.system}{END_OF_TURN}"
    for turn in example.turns[:-1]:
        said += f"{USER}{turn.question}{END_OF_TURN}{ASSISTANT}{turn.answer}{END_OF_TURN}"
    return f"{said}{USER}{example.turns[-1].question}{END_OF_TURN}{ASSISTANT}"


if __name__ == "__main__":
    FILE.write_bytes(written())
