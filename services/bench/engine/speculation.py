"""`bench speculation`: output tokens per second with each method of drafting and without.

All engines stand ready at once and take turns with the same requests, round after round, so that whatever else the
machine does falls on all of them. Figures are the medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from tokenizers import Tokenizer

from services.bench.engine.process import single_engine
from services.bench.engine.requests import FiniteLoad, RoundFigures
from services.bench.errors import BenchError
from services.bench.options import model_arguments, output_group, output_options, parse
from services.bench.prefixes.prompt_files import read_prompts
from services.bench.report import Report, Table

HEADS = ("concurrency", "method", "tokens/s", "against none", "tokens per step", "drafts accepted")
NONE = "none"


def speculation_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    parser = argparse.ArgumentParser("baton bench speculation", description=__doc__)
    model_arguments(parser, "Model directory; by default the demo model.")
    parser.add_argument(
        "--drafters", type=Path, help="Folder of medusa, eagle, eagle3 and draft; by default the demo's."
    )
    parser.add_argument(
        "--methods",
        default="ngram,suffix,draft,medusa,eagle,eagle3",
        help="Those to compare with none; eagle3:4 drafts trees of topk 4, and eagle3:4:8 of 8 rows at the most.",
    )
    parser.add_argument("--tokens", type=int, default=3, help="Drafts of a step at the most.")
    parser.add_argument("--policy", choices=["dynamic", "fixed"], default="dynamic", help="The scheduler's.")
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--requests", type=int, default=24, help="Of each round.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=Path, help="JSON lines of prompts; by default for the demo model.")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker.")
    output_group(parser)
    return parse(parser, argv)


async def main(argv: Sequence[str]) -> int:
    """The exit code: 0 if all requested measurements could be made. Raises BenchError."""
    options = speculation_options(argv)
    if options.model is None or options.prompts is None:
        raise BenchError("a model and prompts are needed: baton bench has both")
    folder = Path(options.model)
    prompts = _prompts(options.prompts, folder / "tokenizer.json", options.requests * options.rounds)
    report, table = Report(output_options(options)), Table(HEADS, names=2)
    found: dict[str, Any] = {"model": options.model_name or folder.name, "temperature": options.temperature}
    found["speculation"] = []
    async with contextlib.AsyncExitStack() as engines:
        loads = {
            method: await _started(options, folder, method, engines) for method in (NONE, *options.methods.split(","))
        }
        for load in loads.values():
            await load.answer(prompts[:4], 2)
        title = f"{options.rounds} rounds of {options.requests} requests, temperature {options.temperature:g}"
        report.show(f"{title}\n\n{table.head()}")
        for concurrency in map(int, options.concurrency.split(",")):
            figures: dict[str, list[RoundFigures]] = {method: [] for method in loads}
            for number in range(options.rounds):
                part = prompts[number * options.requests : (number + 1) * options.requests]
                for method, load in loads.items():
                    figures[method].append(await load.answer(part, concurrency))
            for compared in _compared(concurrency, figures):
                report.show(table.row(_cells(compared)))
                found["speculation"].append(compared)
                report.keep(found)
    report.end(found)
    return 0


async def _started(
    options: argparse.Namespace, folder: Path, method: str, engines: contextlib.AsyncExitStack
) -> FiniteLoad:
    flags = {"model": str(folder), "device": "cpu", "kv-memory": "256MiB", "threads": str(options.threads)}
    if method != NONE:
        flags["speculative"] = _settings(method, options.drafters or folder.parent, options.tokens)
    engine = single_engine(options.nats_server, {"speculation": options.policy}, flags)
    load = FiniteLoad(*await engines.enter_async_context(engine), temperature=options.temperature)
    await load.listen()
    return load


def _prompts(path: Path, tokenizer: Path, count: int) -> list[list[int]]:
    """The first `count` of the file, as token ids. Raises BenchError where it holds fewer, or others than text."""
    encoder = Tokenizer.from_file(str(tokenizer))
    texts = list(islice(read_prompts(path, "jsonl", "all"), count))
    if len(texts) < count or not all(isinstance(text, str) for text in texts):
        raise BenchError(f"{path}: {count} prompts of text are needed: --requests × --rounds")
    return [list(encoder.encode(text, add_special_tokens=False).ids) for text in texts if isinstance(text, str)]


def _settings(method: str, drafters: Path, tokens: int) -> str:
    method, *tree = method.split(":")
    settings: dict[str, object] = {"method": method, "num_speculative_tokens": tokens}
    settings |= zip(("speculative_eagle_topk", "speculative_num_draft_tokens"), map(int, tree), strict=False)
    if method not in ("ngram", "suffix", "mtp"):
        settings["model"] = str((drafters / method).absolute())
    return msgspec.json.encode(settings).decode()


def _compared(concurrency: int, figures: dict[str, list[RoundFigures]]) -> list[dict[str, Any]]:
    """Figures of each method, beside those without drafts."""
    plain = figures[NONE]
    return [
        {
            "concurrency": concurrency,
            "method": method,
            "tokens_per_second": median(one.tokens_per_second for one in rounds),
            # Round by round: both had the same requests at about the same time.
            "against_none": median(
                one.tokens_per_second / other.tokens_per_second for one, other in zip(rounds, plain, strict=True)
            ),
            "tokens_per_step": sum(one.tokens for one in rounds) / sum(one.decodes for one in rounds),
            "drafted": sum(one.drafted for one in rounds),
            "accepted": sum(one.accepted for one in rounds),
        }
        for method, rounds in figures.items()
    ]


def _cells(compared: dict[str, Any]) -> list[str]:
    drafted, accepted = compared["drafted"], compared["accepted"]
    return [
        str(compared["concurrency"]),
        compared["method"],
        f"{compared['tokens_per_second']:.0f}",
        f"{compared['against_none']:.2f}",
        f"{compared['tokens_per_step']:.2f}",
        f"{accepted / drafted:.0%}" if drafted else "-",
    ]
