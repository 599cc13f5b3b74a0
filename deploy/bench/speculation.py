"""`baton bench speculation`: output tokens per second with each method of drafting and without, as a Markdown table.

All engines stand ready at once and take turns with the same requests, round after round, so that whatever else the
machine does falls on all of them. Figures are the medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from deploy.bench.answering import AnsweringLoad, RoundFigures
from deploy.bench.demo_prompts import demo_prompts
from deploy.bench.engine_alone import engine_alone
from deploy.cli.stack_spec import model_directory

HEADER = ("concurrency", "method", "tokens/s", "against none", "tokens per step", "drafts accepted")
NONE = "none"


def run_speculation(argv: Sequence[str]) -> None:
    """Raises CommandError, or SystemExit for flags that are none."""
    asyncio.run(_run(_parsed(argv)))


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("baton bench speculation", description=__doc__)
    parser.add_argument("--model", help="Model directory; by default the demo model.")
    parser.add_argument("--drafters", type=Path, help="Folder of medusa, eagle and draft; by default the demo model's.")
    parser.add_argument("--methods", default="ngram,draft,medusa,eagle", help="Those to compare with none.")
    parser.add_argument("--tokens", type=int, default=3, help="Drafts of a step at the most.")
    parser.add_argument("--policy", choices=["dynamic", "fixed"], default="dynamic", help="The scheduler's.")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--requests", type=int, default=24, help="Of each round.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker.")
    return parser.parse_args(argv)


async def _run(options: argparse.Namespace) -> None:
    folder = model_directory(options.model)
    drafters = options.drafters or folder.parent
    prompts = demo_prompts(folder / "tokenizer.json", options.requests * options.rounds)
    async with contextlib.AsyncExitStack() as engines:
        loads: dict[str, AnsweringLoad] = {}
        for method in (NONE, *options.methods.split(",")):
            flags = {"model": str(folder), "device": "cpu", "kv-memory": "256MiB", "threads": str(options.threads)}
            if method != NONE:
                flags["speculative"] = _settings(method, drafters, options.tokens)
            scheduler = {"speculation": options.policy}
            bus, engine, card = await engines.enter_async_context(engine_alone(scheduler, flags))
            loads[method] = AnsweringLoad(bus, engine, card, options.temperature)
            await loads[method].listen()
            await loads[method].answer(prompts[:4], 2)
        print(f"{options.rounds} rounds of {options.requests} requests, temperature {options.temperature:g}\n")
        print(_row(HEADER))
        print(_row(["---"] * len(HEADER)))
        for concurrency in map(int, options.concurrency.split(",")):
            figures: dict[str, list[RoundFigures]] = {method: [] for method in loads}
            for number in range(options.rounds):
                part = prompts[number * options.requests : (number + 1) * options.requests]
                for method, load in loads.items():
                    figures[method].append(await load.answer(part, concurrency))
            for cells in _rows(concurrency, figures):
                print(_row(cells), flush=True)


def _settings(method: str, drafters: Path, tokens: int) -> str:
    settings: dict[str, object] = {"method": method, "num_speculative_tokens": tokens}
    if method != "ngram":
        settings["model"] = str((drafters / method).absolute())
    return msgspec.json.encode(settings).decode()


def _rows(concurrency: int, figures: dict[str, list[RoundFigures]]) -> list[list[str]]:
    plain = figures[NONE]
    rows = []
    for method, rounds in figures.items():
        speed = median(one.tokens_per_second for one in rounds)
        # Round by round: both had the same requests at about the same time.
        against = median(
            one.tokens_per_second / other.tokens_per_second for one, other in zip(rounds, plain, strict=True)
        )
        drafted = sum(one.drafted for one in rounds)
        accepted = sum(one.accepted for one in rounds)
        rows.append(
            [
                str(concurrency),
                method,
                f"{speed:.0f}",
                f"{against:.2f}",
                f"{sum(one.tokens for one in rounds) / sum(one.decodes for one in rounds):.2f}",
                f"{accepted / drafted:.0%}" if drafted else "-",
            ]
        )
    return rows


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
