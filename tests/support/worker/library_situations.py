"""Situations of a scheduler's making, in which a backend must generate what its reference does."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.worker.backend import Backend
from tests.support.models.tiny_models import VOCABULARY, TinyModel
from tests.support.worker.plan_driver import Driver

OUTPUT = 6
LENGTHS = (1, 2, 7, 16, 17, 25, 33, 48, 71)
"""Of prompts, from a single token to several blocks, windows crossed and block edges hit."""
FEW_LENGTHS = (1, 16, 33, 71)
"""Of those, where each length is tried elsewhere: a token, a whole block, and prompts that steps cut."""


def prompt(length: int, seed: int = 0) -> list[int]:
    """Tokens that are none of the special ones."""
    random = Random(seed)
    return [random.randrange(3, VOCABULARY) for _ in range(length)]


def check_mixed_batch(model: TinyModel, backend: Backend, lengths: Sequence[int] = LENGTHS) -> None:
    """Prompts of all `lengths` and decodes in the same steps."""
    driver = Driver(backend, budget=61)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    sequences = [driver.add(tokens, OUTPUT) for tokens in prompts]
    driver.run()
    said = [sequence.output for sequence in sequences]
    assert said == generated(model, prompts, said)


def generated(model: TinyModel, prompts: Sequence[list[int]], said: Sequence[list[int]]) -> list[list[int]]:
    """What the reference generates of each prompt; `said` is compared with it."""
    return [model.greedy(tokens, OUTPUT, each) for tokens, each in zip(prompts, said, strict=True)]


def check_resumed_sequences(model: TinyModel, backend: Backend) -> None:
    """A prompt in chunks, another that shares its blocks, and one that is preempted."""
    common = prompt(40, seed=1)
    prompts = [common + prompt(30, seed=2), common + prompt(3, seed=3), prompt(50, seed=4)]
    driver = Driver(backend, budget=29)
    first = driver.add(prompts[0], OUTPUT)
    while not first.output:
        driver.step()
    sharing = driver.add(prompts[1], OUTPUT)
    assert driver.share_prefix(sharing, first) == 40 // backend.card.block_size * backend.card.block_size
    preempted = driver.add(prompts[2], OUTPUT)
    while len(preempted.output) < 3:
        driver.step()
    driver.preempt(preempted)
    driver.run()
    said = [first.output, sharing.output, preempted.output]
    assert said == generated(model, prompts, said)
