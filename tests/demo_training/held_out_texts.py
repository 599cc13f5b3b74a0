"""The texts in `deploy/demo/held_out.jsonl`: `python -m tests.demo_training.held_out_texts` writes them.

Conversations up to a question that was kept from training and its answer, and passages with what follows.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from tests.demo_training.evaluation import questions, wanted
from tests.demo_training.examples import Passage
from tests.demo_training.mixture import DRAWS
from tests.demo_training.prompts import text_of
from tests.demo_training.vocabulary import END_OF_TEXT, END_OF_TURN
from tests.support.paths import DEMO

OF_EACH_KIND = 20
SEED = 11
FILE = DEMO / "held_out.jsonl"


def written() -> bytes:
    """What the file holds, the same every time: JSON objects, a line each."""
    return b"".join(msgspec.json.encode(each) + b"\n" for each in _texts())


def _texts() -> Iterator[dict[str, str]]:
    for kind in DRAWS:
        for example in questions(kind, OF_EACH_KIND, SEED):
            end = END_OF_TEXT if isinstance(example, Passage) else END_OF_TURN
            yield {"prompt": text_of(example), "completion": wanted(example) + end}


if __name__ == "__main__":
    FILE.write_bytes(written())
