"""`bench prefixes FILE`: how much the prompts of a file repeat their beginnings. Needs no server."""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from services.bench.errors import BenchError
from services.bench.options import natural, output_group, output_options, parse, whole
from services.bench.prefixes.prompt_files import BlockIds, FilePrompt, Format, TokenIds, Turns, read_prompts
from services.bench.prefixes.radix_tree import PrefixCount, SharedPrefix
from services.bench.prefixes.symbols import (
    Alphabet,
    BlockAlphabet,
    CharacterAlphabet,
    TokenAlphabet,
    Unit,
    WordAlphabet,
)
from services.bench.report import WIDTH, OutputOptions, Report, Table, blank_figure, check_plot, line, rule, save
from shared.models.model_files import ModelNotFound, resolve_model
from shared.models.tokenizer_files import TokenizerUnusable, load_tokenizer

BATCH = 256
"""Prompts that are tokenized together."""
MIN_LENGTH: dict[Unit, int] = {"tokens": 16, "words": 16, "chars": 64, "blocks": 0}
"""About one block of an engine's cache: shorter prefixes are of no use to it."""
SHOWN = 60
"""Characters of a prefix in the table, half from each end."""

DESCRIPTION = """\
Puts all prompts of FILE into a radix tree that counts how many prompts go through each node, and reports:

  ideal hit rate    prompt tokens that an earlier prompt began with, of all prompt tokens: what a prefix cache without
                    limits would reach for prompts in this order; in whole blocks as well, as engines keep them
  shared tokens     prompt tokens that any other prompt has too, behind the same beginning, of all
  shared prefixes   the tree is pruned below --min-visits; its leaves that are longer than --min-length are the shared
                    prefixes. Prompts behind one: those that go through one of them, of all prompts. Covered: the
                    tokens of these prefixes in these prompts, of all. Behind any: prompts that go through any node
                    that is left and is longer than --min-length, of all: also those that leave it before a leaf

FILE: JSON lines of OpenAI requests (batch files too), {"prompt": ...}, {"messages": ...}, conversations, Dolly's
instructions or Mooncake traces; a JSON array of these (ShareGPT); a Parquet file of these (LMSYS-Chat-1M; needs
pyarrow); or text, one prompt a line. May end in .gz, but for Parquet; - is standard input.
"""


class PrefixOptions(NamedTuple):
    """The flags of `bench prefixes`. Lengths are in the unit that is compared."""

    file: Path
    tokenizer: str | None
    unit: Unit | None
    format: Format
    turns: Turns
    min_visits: int | None
    min_length: int | None
    block_size: int
    max_prompts: int | None
    max_stored: int
    top: int
    plot: Path | None
    output: OutputOptions


def prefix_options(argv: Sequence[str] | None) -> PrefixOptions:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    made = argparse.ArgumentParser(
        prog="bench prefixes", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("file", type=Path, metavar="FILE")
    made.add_argument("--tokenizer", "--model", help="folder or Hugging Face id whose tokens are compared")
    made.add_argument("--unit", choices=get_args(Unit), help="default: tokens where known, else chars")
    made.add_argument("--format", choices=get_args(Format), default="auto")
    made.add_argument(
        "--turns",
        choices=get_args(Turns),
        default="all",
        help="turns of conversations to use as prompts; default: %(default)s",
    )
    made.add_argument("--min-visits", type=natural, metavar="N", help="default: one in 1,000 prompts, 2 at least")
    made.add_argument("--min-length", type=whole, metavar="L", help="default: 16 tokens or words, 64 chars, 0 blocks")
    made.add_argument("--block-size", type=natural, default=16, help="tokens of a cache block; default: %(default)s")
    made.add_argument("--max-prompts", type=natural, help="read at most this many prompts")
    made.add_argument(
        "--max-stored",
        type=natural,
        default=500_000_000,
        help="units that the tree may hold; beyond it forgets what only one prompt has. Default: %(default)s",
    )
    made.add_argument("--top", type=natural, default=10, help="shared prefixes to list; default: %(default)s")
    made.add_argument("--plot", type=Path, help="draw to this .png, .svg or .pdf (needs matplotlib)")
    output_group(made)
    given = parse(made, argv)
    given.output = output_options(given)
    return PrefixOptions(**{name: getattr(given, name) for name in PrefixOptions._fields})


def main(argv: Sequence[str]) -> int:
    """The exit code: 0 where the file could be read. Raises BenchError where it cannot, or where its prompts
    cannot be compared as requested."""
    options = prefix_options(argv)
    check_plot(options.plot)
    prompts = islice(read_prompts(options.file, options.format, options.turns), options.max_prompts)
    first = next(prompts, None)
    if first is None:
        raise BenchError(f"{options.file}: no prompt is in it")
    alphabet = _alphabet(options, first)
    count = PrefixCount(options.block_size if alphabet.unit == "tokens" else 1, options.max_stored)
    for batch in _batches(chain([first], prompts)):
        for symbols in alphabet.encode(batch):
            count.add(symbols)
    min_visits = options.min_visits or max(2, len(count.repeated) // 1000)
    min_length = MIN_LENGTH[alphabet.unit] if options.min_length is None else options.min_length
    figures, prefixes = count.figures(min_visits, min_length)
    result = _result(options, alphabet, figures, prefixes)
    Report(options.output).end(result, "\n".join(_lines(result)))
    if options.plot is not None:
        plot_prefixes(options.plot, alphabet.unit, prefixes, count.repeated)
    return 0


def _alphabet(options: PrefixOptions, first: FilePrompt) -> Alphabet:
    """By the option, else by the tokenizer, else by the kind of the first prompt."""
    if isinstance(first, BlockIds):
        return BlockAlphabet()
    unit = options.unit or ("tokens" if options.tokenizer or isinstance(first, TokenIds) else "chars")
    if unit == "words":
        return WordAlphabet()
    if unit == "chars":
        return CharacterAlphabet()
    if unit == "blocks":
        raise BenchError(f"--unit blocks: {options.file} holds prompts, not hashes of blocks")
    if options.tokenizer is None:
        return TokenAlphabet(None)
    try:
        return TokenAlphabet(load_tokenizer(resolve_model(options.tokenizer, weights=False)).tokenizer)
    except (ModelNotFound, TokenizerUnusable) as error:
        raise BenchError(str(error)) from None


def _batches(prompts: Iterable[FilePrompt]) -> Iterator[list[FilePrompt]]:
    prompts = iter(prompts)
    while batch := list(islice(prompts, BATCH)):
        yield batch


def _result(
    options: PrefixOptions, alphabet: Alphabet, figures: dict[str, Any], prefixes: Sequence[SharedPrefix]
) -> dict[str, Any]:
    top = [
        {
            "visits": prefix.visits,
            "length": prefix.length,
            "share": prefix.visits / figures["prompts"],
            "text": alphabet.decode(prefix.text),
        }
        for prefix in prefixes[: options.top]
    ]
    return {
        "file": str(options.file),
        "tokenizer": options.tokenizer,
        "unit": alphabet.unit,
        **figures,
        "top": top,
    }


def _lines(result: dict[str, Any]) -> list[str]:
    unit = result["unit"]
    lines = [
        rule(" Prefix Repetition ", "="),
        line("Prompts:", result["prompts"]),
        line(f"All their {unit}:", result["total_length"]),
        line(f"Mean {unit} per prompt:", result["mean_prompt_length"]),
        line(f"Ideal hit rate (% of {unit}):", 100 * result["ideal_hit_rate"]),
    ]
    if result["block_size"] > 1:
        title = f"  in blocks of {result['block_size']}:"
        lines.append(line(title, 100 * result["ideal_hit_rate_in_blocks"]))
    lines.append(line(f"Shared {unit} (%):", 100 * result["shared_share"]))
    lines.append(rule(f"Visits >= {result['min_visits']}, longer than {result['min_length']} {unit}"))
    lines.append(line("Shared prefixes:", result["shared_prefixes"]))
    lines.append(line("Prompts behind one (% of prompts):", 100 * result["prompt_share"]))
    lines.append(line("Prompts behind any (% of prompts):", 100 * result["behind_any_share"]))
    lines.append(line(f"Covered {unit} (%):", 100 * result["covered_share"]))
    lines += _distribution("length", result["prefix_length"]) + _distribution("prompts", result["prefix_visits"])
    lines += _top(result["top"])
    if result["forgotten_prompts"]:
        lines.append(
            f"lower bounds: {result['forgotten_prompts']} tails of single prompts were forgotten (--max-stored)"
        )
    return [*lines, "=" * WIDTH]


def _distribution(name: str, values: dict[str, float] | None) -> list[str]:
    if values is None:
        return []
    listed = ", ".join(f"{key} {value:.0f}" for key, value in values.items())
    return [f"{name} of each: {listed}"]


def _top(top: Sequence[dict[str, Any]]) -> list[str]:
    if not top:
        return []
    rows = [(f"{t['visits']}", f"{100 * t['share']:.1f}", f"{t['length']}", _excerpt(t["text"])) for t in top]
    table = Table(("prompts", "%", "length", "text"), rows, names=0)
    return [rule("Most visited"), *(line.rstrip() for line in table.lines())]


def _excerpt(text: str) -> str:
    excerpt = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
    return repr(excerpt)[1:-1]


# The plot of `bench prefixes`: what the shared prefixes are like, and how much of each prompt is a repetition.


POINTS = 2000


def plot_prefixes(path: Path, unit: str, prefixes: Sequence[SharedPrefix], repeated: Sequence[int]) -> None:
    """Draws the figure into a file. Raises BenchError if it cannot be written."""
    figure = blank_figure(2)
    left, right = figure.subplots(1, 2)
    left.scatter([p.length for p in prefixes], [p.visits for p in prefixes], s=9, alpha=0.6, linewidths=0)
    if prefixes:
        left.set_yscale("log")
    left.set(xlabel=f"length in {unit}", ylabel="prompts", title=f"{len(prefixes)} shared prefixes")
    lengths, shares = survival(repeated)
    right.step(lengths, shares, where="post")
    right.set(xlabel=f"repeated beginning: at least so many {unit}", ylabel="share of prompts", ylim=(0, 1.02))
    right.set_xlim(left=0)
    right.set_title("what an earlier prompt began with")
    save(figure, path)


def survival(values: Sequence[int]) -> tuple[list[int], list[float]]:
    """Some lengths, ascending, and for each the share of `values` that are at least as large."""
    ordered = sorted(values)
    number = len(ordered)
    places = sorted({round(i * (number - 1) / POINTS) for i in range(POINTS + 1)}) if number else []
    lengths = sorted({ordered[place] for place in places})
    return lengths, [1 - bisect_left(ordered, length) / number for length in lengths]
