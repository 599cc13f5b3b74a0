"""What `bench serve` is told. Names are those of vLLM's `bench serve` where it has them, as aliases at least."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from services.bench.core.statistics import Metric, parse_goodput
from services.bench.datasets.multi_turn import TurnsShape
from services.bench.datasets.shared_prefix import PrefixShape
from services.bench.options import (
    OutputOptions,
    TargetOptions,
    fields,
    fraction,
    natural,
    not_negative,
    parser,
    percent_list,
    positive,
    whole,
)

Dataset = Literal["random", "sharegpt", "shared-prefix", "multi-turn"]
VLLM_NAMES: dict[str, Dataset] = {"prefix_repetition": "shared-prefix"}


class ServeOptions(NamedTuple):
    target: TargetOptions
    output: OutputOptions
    dataset: Dataset
    dataset_path: Path | None
    num_prompts: int
    """Of multi-turn: turns of all conversations."""
    input_len: int
    output_len: int
    range_ratio: float
    prefixes: PrefixShape
    num_conversations: int
    turns: TurnsShape
    sharegpt_output_len: int | None
    text: bool
    """Prompts as text (always for chat), not as token ids."""
    tokenizer: Path | None
    vocab_size: int | None
    request_rate: float
    """Of multi-turn: conversations that begin."""
    burstiness: float
    max_concurrency: int | None
    warmup: int
    ignore_eos: bool
    seed: int
    goodput: dict[Metric, float]
    percentiles: list[float]
    cpu: bool
    pids: dict[str, int]


def serve_options(argv: Sequence[str] | None) -> ServeOptions:
    """Parses the flags of `serve`; a bad one is explained, and ends the process with status 2."""
    made = parser("serve", "Requests as clients would make them: latencies and throughput under a given load.")
    _add_dataset(made)
    _add_shared_prefix(made)
    _add_multi_turn(made)
    _add_load(made)
    made.set_defaults(ignore_eos=None)
    given = made.parse_args(argv)
    given.dataset = VLLM_NAMES.get(given.dataset, given.dataset)
    if given.ignore_eos is None:
        # Behind random tokens a model says anything, often that it has ended: exact lengths are what is asked for.
        given.ignore_eos = given.dataset == "random"
    _check(made, given)
    given.num_prompts = _number(given)
    given.prefixes = PrefixShape(
        given.num_prefixes, given.prefix_len, given.suffix_len, given.output_len, given.prefix_popularity
    )
    given.turns = TurnsShape(
        given.num_turns, given.system_len, given.user_len, given.output_len, given.range_ratio, given.think_time
    )
    return ServeOptions(**fields(made, given, ServeOptions._fields))


def _add_dataset(made: argparse.ArgumentParser) -> None:
    data = made.add_argument_group("dataset")
    data.add_argument("--dataset", "--dataset-name", choices=(*get_args(Dataset), *VLLM_NAMES), default="random")
    data.add_argument("--dataset-path", type=Path, help="file of the sharegpt dataset")
    data.add_argument("--num-prompts", type=natural, help="default: 1000; shared-prefix: prefixes × questions")
    data.add_argument("--random-input-len", "--input-len", dest="input_len", type=natural, default=128)
    data.add_argument(
        "--random-output-len",
        "--output-len",
        "--prefix-repetition-output-len",
        dest="output_len",
        type=natural,
        default=128,
        help="of every dataset but sharegpt; default: %(default)s",
    )
    data.add_argument("--random-range-ratio", dest="range_ratio", type=fraction, default=0.0)
    data.add_argument("--sharegpt-output-len", type=natural, help="default: as long as the real answer")


def _add_shared_prefix(made: argparse.ArgumentParser) -> None:
    data = made.add_argument_group("shared-prefix dataset", "Questions behind a few long beginnings.")
    data.add_argument("--num-prefixes", "--prefix-groups", "--prefix-repetition-num-prefixes", type=natural, default=8)
    data.add_argument(
        "--prefix-questions", type=natural, default=16, help="of each prefix, where --num-prompts is not given"
    )
    data.add_argument("--prefix-len", "--prefix-repetition-prefix-len", type=natural, default=512, help="tokens")
    data.add_argument(
        "--suffix-len", "--question-len", "--prefix-repetition-suffix-len", type=natural, default=64, help="tokens"
    )
    data.add_argument(
        "--prefix-popularity",
        type=not_negative,
        default=0.0,
        metavar="EXPONENT",
        help="of Zipf's law: 0 (default): every prefix as often; 1: the second half as often as the first, ...",
    )


def _add_multi_turn(made: argparse.ArgumentParser) -> None:
    data = made.add_argument_group(
        "multi-turn dataset",
        "Conversations: each question behind the server's real answers to those before. --request-rate is that of new "
        "conversations, --random-range-ratio varies their lengths.",
    )
    data.add_argument("--num-conversations", type=natural, default=32)
    data.add_argument("--num-turns", type=natural, default=4, help="questions of each")
    data.add_argument("--user-len", type=natural, default=64, help="tokens of a question")
    data.add_argument("--system-len", type=whole, default=0, help="tokens of a system prompt that all share")
    data.add_argument("--think-time", type=not_negative, default=0.0, help="mean seconds from answer to next question")


def _add_load(made: argparse.ArgumentParser) -> None:
    load = made.add_argument_group("load")
    load.add_argument("--request-rate", type=positive, default=float("inf"), help="requests/s; default: %(default)s")
    load.add_argument("--burstiness", type=positive, default=1.0, help="1: Poisson; less: burstier; more: steadier")
    load.add_argument("--max-concurrency", type=natural)
    load.add_argument("--warmup", "--num-warmups", dest="warmup", type=whole, default=1, help="requests made before")
    made.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="ttft, tpot, e2el objectives")
    made.add_argument("--percentiles", "--metric-percentiles", type=percent_list, default=[99.0])


def _check(made: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.dataset == "sharegpt" and given.dataset_path is None:
        made.error("--dataset sharegpt needs --dataset-path")
    if given.dataset == "multi-turn" and given.num_prompts is not None:
        made.error("--num-prompts: multi-turn makes --num-conversations × --num-turns requests")
    if given.dataset == "multi-turn" and given.prompt_format == "tokens":
        made.error("--prompt-format tokens: the answers that multi-turn repeats are text")
    if given.dataset == "multi-turn":
        given.prompt_format = "text"
    try:
        given.goodput = parse_goodput(given.goodput)
    except ValueError as error:
        made.error(f"--goodput: {error}")


def _number(given: argparse.Namespace) -> int:
    if given.dataset == "multi-turn":
        return int(given.num_conversations * given.num_turns)
    if given.num_prompts is None and given.dataset == "shared-prefix":
        return int(given.num_prefixes * given.prefix_questions)
    return 1000 if given.num_prompts is None else int(given.num_prompts)
