"""How evenly experts' load falls on ranks, placed evenly and by DeepSeek's algorithm. Run by hand:

    python -m tests.benchmarks.expert_balance

Experts of a layer are picked with probabilities that fall as 1 / place^skew, in random order (Zipf). The table says
how much the mean rank has to do of what the busiest one has, evenly and placed, with and without replicas. Experts are
placed by one sample of tokens; the load is that of another.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from services.worker.models.expert_parallel.expert_balance import balance_of
from services.worker.models.expert_parallel.placement import balance_experts, spread_evenly

LAYERS, TOKENS = 20, 4096
SKEWS = (0.2, 0.5, 1.0)


class Shape(NamedTuple):
    """A model, and the ranks that its experts are spread over."""

    name: str
    experts: int
    chosen: int
    groups: int
    ranks: int
    hosts: int
    redundant: tuple[int, ...]


SHAPES = (
    Shape("Qwen3-30B-A3B", 128, 8, 1, 8, 1, (0, 8, 32)),
    Shape("DeepSeek-V3", 256, 8, 8, 32, 4, (0, 32, 64)),
)


class Balance(NamedTuple):
    """Mean over maximum of the ranks' loads, the mean of all layers."""

    even: float
    placed: tuple[float, ...]
    """By a sample, for each number of replicas."""


def picks(probabilities: list[float], tokens: int, chosen: int, random: Random) -> list[int]:
    """How often each expert is picked by so many tokens of `chosen` different experts each."""
    counts = [0] * len(probabilities)
    numbers = range(len(probabilities))
    for _ in range(tokens):
        own: set[int] = set()
        while len(own) < chosen:
            own.update(random.choices(numbers, probabilities, k=chosen - len(own)))
        for expert in own:
            counts[expert] += 1
    return counts


def balance(shape: Shape, skew: float, *, layers: int = LAYERS, tokens: int = TOKENS, seed: int = 0) -> Balance:
    """Of layers with experts of other orders each; experts are placed by other tokens than those that come then."""
    random = Random(seed)
    even = [0.0] * layers
    placed = [[0.0] * layers for _ in shape.redundant]
    for layer in range(layers):
        probabilities = [1 / place**skew for place in range(1, shape.experts + 1)]
        random.shuffle(probabilities)
        sample, load = (picks(probabilities, tokens, shape.chosen, random) for _ in range(2))
        even[layer] = balance_of(spread_evenly(shape.experts, shape.ranks).loads(load))
        for number, redundant in enumerate(shape.redundant):
            found = balance_experts(sample, shape.ranks, redundant=redundant, groups=shape.groups, hosts=shape.hosts)
            placed[number][layer] = balance_of(found.loads(load))
    return Balance(sum(even) / layers, tuple(sum(each) / layers for each in placed))


def main() -> None:
    """Prints the table."""
    print("| model, experts on ranks | skew | evenly | placed | with replicas |")
    print("|---|---:|---:|---:|---|")
    for shape in SHAPES:
        for skew in SKEWS:
            found = balance(shape, skew)
            more = ", ".join(
                f"{count}: {each:.2f}" for count, each in zip(shape.redundant[1:], found.placed[1:], strict=True)
            )
            where = f"{shape.name}, {shape.experts} on {shape.ranks}"
            print(f"| {where} | {skew} | {found.even:.2f} | {found.placed[0]:.2f} | {more} |")


if __name__ == "__main__":
    main()
