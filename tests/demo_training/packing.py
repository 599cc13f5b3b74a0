"""Examples into rows of tokens: several documents a row, each seeing only itself, and which tokens are learnt."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from tests.demo_training.examples import Example, Exchange, Passage
from tests.demo_training.vocabulary import ASSISTANT, END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS, SYSTEM, USER

ROW_LENGTHS = (128, 384, 1024)
"""Attention is the dear part on a CPU: short documents share short rows, only long ones are given long rows."""

Document = tuple[list[int], list[bool]]
"""Token ids, and for each whether predicting it counts in the loss."""


@dataclass(frozen=True)
class Batch:
    """Rows of one length: ids, targets (-100 where nothing is learnt), positions and the mask of who sees whom."""

    ids: torch.Tensor  # [rows, length]
    targets: torch.Tensor  # [rows, length]; the token after each position
    positions: torch.Tensor  # [rows, length]; from 0 in every document
    mask: torch.Tensor  # [rows, 1, length, length]; True where attention may look


class Encoder:
    """Turns examples into documents. Only answers count in the loss; of plain text, everything does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        special = (SYSTEM, USER, ASSISTANT, END_OF_TURN, END_OF_TEXT)
        ids = [SPECIAL_TOKENS.index(token) for token in special]
        self._system, self._user, self._assistant, self._end, self._stop = ids

    def document(self, example: Example) -> Document:
        """The example as the chat template would write it, cut at the longest row."""
        ids, counts = self._passage(example) if isinstance(example, Passage) else self._chat(example)
        return ids[: ROW_LENGTHS[-1]], counts[: ROW_LENGTHS[-1]]

    def _text(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _passage(self, passage: Passage) -> Document:
        # Prompt and continuation are encoded apart, as a client sends the prompt alone.
        ids = [*self._text(passage.prompt), *self._text(passage.continuation), self._stop]
        return ids, [True] * len(ids)

    def _chat(self, exchange: Exchange) -> Document:
        ids: list[int] = []
        counts: list[bool] = []

        def say(role: int, text: str, learnt: bool) -> None:
            spoken = [*self._text(text), self._end]
            ids.extend((role, *spoken))
            counts.extend((False, *([learnt] * len(spoken))))

        if exchange.system is not None:
            say(self._system, exchange.system, learnt=False)
        for turn in exchange.turns:
            say(self._user, turn.question, learnt=False)
            say(self._assistant, turn.answer, learnt=True)
        return ids, counts


def fill_rows(documents: Iterable[Document]) -> dict[int, list[list[Document]]]:
    """Documents laid into rows, for each row length: longest first, each into the first row with room."""
    rows: dict[int, list[list[Document]]] = {length: [] for length in ROW_LENGTHS}
    room: dict[int, list[int]] = {length: [] for length in ROW_LENGTHS}
    for document in sorted(documents, key=lambda document: -len(document[0])):
        size = len(document[0])
        length = next(length for length in ROW_LENGTHS if size <= length)
        index = next((i for i, free in enumerate(room[length]) if free >= size), None)
        if index is None:
            rows[length].append([])
            room[length].append(length)
            index = len(rows[length]) - 1
        rows[length][index].append(document)
        room[length][index] -= size
    return rows


def batches(documents: Iterable[Document], most_tokens: int) -> Iterator[Batch]:
    """The documents as batches of at most about `most_tokens` tokens each."""
    for length, rows in fill_rows(documents).items():
        size = max(1, most_tokens // length)
        for start in range(0, len(rows), size):
            yield _batch(rows[start : start + size], length)


def _batch(rows: list[list[Document]], length: int) -> Batch:
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    targets = torch.full((len(rows), length), -100)
    positions = torch.zeros(len(rows), length, dtype=torch.long)
    owner = torch.full((len(rows), length), -1)
    for row, documents in enumerate(rows):
        at = 0
        for number, (tokens, counts) in enumerate(documents):
            end = at + len(tokens)
            ids[row, at:end] = torch.tensor(tokens)
            # Position i predicts token i + 1, so the first token of a document is nobody's target.
            wanted = [token if counted else -100 for token, counted in zip(tokens[1:], counts[1:], strict=True)]
            targets[row, at : end - 1] = torch.tensor(wanted)
            positions[row, at:end] = torch.arange(len(tokens))
            owner[row, at:end] = number
            at = end
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = (owner[:, :, None] == owner[:, None, :]) & causal
    return Batch(ids, targets, positions, mask[:, None])
