"""How often drafts at a temperature are accepted: by inverse distribution functions of one number, by races, and by
rejection sampling. Exact for each pair of distributions: nothing is drawn but the text.

    python -m tests.benchmarks.draft_acceptance

The demo model and its draft model, on the model's own outputs; and logits that are random, with noise for the drafter's
error: flat distributions over a large vocabulary, which the demo model has not.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.support.paths import DEMO

Pair = tuple[Tensor, Tensor]
"""Logits of model and drafter, [V] each."""


def by_inverse_functions(p: Tensor, q: Tensor) -> float:
    """One number in [0, 1), turned over in both cumulated distributions in the order of tokens."""
    above, below = torch.minimum(p.cumsum(0), q.cumsum(0)), torch.maximum(p.cumsum(0) - p, q.cumsum(0) - q)
    return float((above - below).clamp(min=0).sum())


def by_races(p: Tensor, q: Tensor) -> float:
    """The sum over tokens i of 1 / sum over j of max(p_j / p_i, q_j / q_i): with the tokens in the order of p / q, p
    counts of those behind i and q of the others."""
    order = (p / q.clamp(min=1e-300)).argsort()
    p, q = p[order], q[order]
    losing = (p.sum() - p.cumsum(0)) / p + q.cumsum(0) / q
    return float(torch.where((p > 0) & (q > 0), 1 / losing, 0.0).sum())


def by_rejection(p: Tensor, q: Tensor) -> float:
    """1 minus the distance in total variation."""
    return float(torch.minimum(p, q).sum())


def distribution(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """float64 [V]"""
    chances = torch.softmax(logits.double() / temperature, dim=0)
    ordered, ids = chances.sort(descending=True)
    chances[ids[ordered.cumsum(0) - ordered >= top_p]] = 0.0
    return chances / chances.sum()


@torch.inference_mode()
def demo_pairs(prompts: int, tokens: int) -> Iterator[Pair]:
    """At each position of outputs that the demo model draws at temperature 1."""
    model, draft = (LlamaForCausalLM.from_pretrained(DEMO / each, dtype=torch.float32) for each in ("model", "draft"))
    encoder = Tokenizer.from_file(str(DEMO / "model" / "tokenizer.json"))
    torch.manual_seed(0)
    with (DEMO / "prompts.jsonl").open("rb") as lines:
        for line in islice(lines, prompts):
            ids = torch.tensor([encoder.encode(msgspec.json.decode(line)["prompt"], add_special_tokens=False).ids])
            known, behind = ids.shape[1], model(ids, use_cache=True)
            while ids.shape[1] < known + tokens:
                drawn = torch.multinomial(behind.logits[0, -1].softmax(0), 1).view(1, 1)
                ids = torch.cat((ids, drawn), dim=1)
                behind = model(drawn, past_key_values=behind.past_key_values, use_cache=True)
            yield from zip(*(each(ids).logits[0, known - 1 :] for each in (model, draft)), strict=True)


def random_pairs(vocabulary: int, spread: float, noise: float) -> Iterator[Pair]:
    """Logits of standard deviation `spread`, and the same with noise of standard deviation `noise`."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(10):
        logits = torch.randn(vocabulary, generator=generator) * spread
        yield logits, logits + torch.randn(vocabulary, generator=generator) * noise


def row(name: str, pairs: Sequence[Pair], temperature: float = 1.0, top_p: float = 1.0) -> str:
    """A line of the table."""
    cut = [[distribution(each, temperature, top_p) for each in pair] for pair in pairs]
    ways = (by_inverse_functions, by_races, by_rejection)
    return f"| {name} | " + " | ".join(f"{sum(way(p, q) for p, q in cut) / len(cut):.3f}" for way in ways) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=80)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model and drafter | one number | race | rejection |\n| --- | ---: | ---: | ---: |")
    demo = list(demo_pairs(options.prompts, tokens=24))
    for temperature, top_p in ((0.7, 1.0), (1.0, 0.9), (1.0, 1.0), (1.5, 1.0), (2.0, 1.0)):
        print(row(f"demo, temperature {temperature}, top_p {top_p}", demo, temperature, top_p))
    for size in ((2048, 2.0, 0.3), (32000, 4.0, 0.5), (32000, 2.5, 0.5), (128256, 4.0, 0.5)):
        print(row("random, vocabulary {}, deviation {}, noise {}".format(*size), list(random_pairs(*size))))


if __name__ == "__main__":
    main()
