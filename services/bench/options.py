"""The options of benchmarks of a server. Flags are named as in vLLM's benchmarks where those have them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import Struct

from services.bench.client.api import Endpoint
from services.bench.client.processor_time import parse_pids
from services.bench.datasets.lengths import LengthDistribution, parse_distribution
from services.bench.datasets.multi_turn import TurnsShape
from services.bench.datasets.single_turn import PrefixShape
from services.bench.report import OutputOptions, command_line
from services.bench.statistics import Metric, parse_goodput
from shared.packing import NOT_DECODED

OptionsT = TypeVar("OptionsT", bound="LoadOptions")


class TargetOptions(NamedTuple):
    """Which server, and how to speak to it."""

    base_url: str
    model: str | None
    api_key: str | None
    endpoint: Endpoint
    timeout: float
    extra_body: dict[str, Any]


class LoadOptions(Struct, frozen=True, kw_only=True):
    """Options of every benchmark that loads a server."""

    target: TargetOptions
    output: OutputOptions
    warmup: int
    """Requests made before."""
    text: bool
    """Prompts as text (always for chat), not as token ids."""
    tokenizer: Path | None
    vocab_size: int | None
    ignore_eos: bool
    seed: int
    cpu: bool
    pids: dict[str, int]


class BatchOptions(LoadOptions, frozen=True, kw_only=True):
    """Options of `latency` and of `throughput`."""

    input_len: int
    output_len: int
    batch_size: int
    iterations: int
    num_prompts: int
    max_concurrency: int | None


ALWAYS_FULL = ("latency", "throughput", "interference")
"""Commands whose answers have their full length by default."""


def checked(convert: Callable[[str], Any], allowed: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """An argparse type that says what it expects."""

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except (*NOT_DECODED, ValueError):
            value = None
        if value is None or not allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r}: {expected} is expected")
        return value

    return parse


natural = checked(int, lambda value: value >= 1, "a whole number from 1")
whole = checked(int, lambda value: value >= 0, "a whole number from 0")
positive = checked(float, lambda value: value > 0, "a number above 0")
not_negative = checked(float, lambda value: 0 <= value < float("inf"), "a number from 0")
fraction = checked(float, lambda value: 0 <= value < 1, "a number from 0 up to, but not, 1")


json_object = checked(msgspec.json.decode, lambda value: isinstance(value, dict), "a JSON object")
distribution = checked(
    parse_distribution, lambda found: True, "normal:LEAST:MOST or uniform:LEAST:MOST, whole numbers from 1,"
)
percent_list = checked(
    lambda text: [float(part) for part in text.split(",")],
    lambda percents: all(0 <= percent <= 100 for percent in percents),
    "a list of numbers from 0 to 100, comma-separated,",
)


def pid_list(text: str) -> dict[str, int]:
    """An argparse type: `NAME=PID,…`, as pids by name."""
    try:
        return parse_pids(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """The flags that all of them have."""
    made = argparse.ArgumentParser(prog=f"bench {command}", description=description)
    target = made.add_argument_group("server")
    target.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    target.add_argument("--model", help="as the server names it; default: the first that it offers")
    target.add_argument("--api-key", help="sent as bearer token")
    target.add_argument("--endpoint", choices=get_args(Endpoint), default="completions", help="default: %(default)s")
    target.add_argument("--timeout", type=positive, default=600.0, help="seconds a request may take")
    target.add_argument("--extra-body", type=json_object, default={}, help="JSON object added to each request")
    target.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=command in ALWAYS_FULL,
        help="answers as long as asked for; default: where prompts are random",
    )
    prompts = made.add_argument_group("prompts")
    prompts.add_argument(
        "--prompt-format", choices=("tokens", "text"), help="default: tokens for completions; chat is always text"
    )
    prompts.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; default: ask the server")
    prompts.add_argument("--vocab-size", type=natural, help="draw token ids below this; default: ask the server")
    prompts.add_argument("--seed", type=int, default=0)
    output = output_group(made)
    output.add_argument("--detailed", action="store_true", help="with every request's figures in the JSON")
    output.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    output.add_argument(
        "--cpu",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="processor time by kind of process of a server on this machine",
    )
    output.add_argument("--pids", type=pid_list, default={}, help="NAME=PID,...: its processes; default: found by port")
    return made


def model_arguments(made: argparse._ActionsContainer, help_text: str) -> None:
    """Of a benchmark that starts engines: a model's folder, and the bus's program. The `baton` command finds them, and
    says in `--model-name` what was typed."""
    made.add_argument("--model", metavar="DIR", help=help_text)
    made.add_argument("--model-name", help=argparse.SUPPRESS)
    made.add_argument("--nats-server", type=Path, help=argparse.SUPPRESS)


def output_group(made: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Where every benchmark's result goes."""
    output = made.add_argument_group("output")
    output.add_argument("--output-json", "--result-file", dest="result_file", type=Path, help="write the result here")
    output.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    output.add_argument("--label", help="kept in the result")
    return output


def parse(made: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags' values, and the `command` itself, without secrets."""
    words = sys.argv[1:] if argv is None else list(argv)
    given = made.parse_args(words)
    given.command = command_line(made.prog, words, getattr(given, "api_key", None))
    return given


def output_options(given: argparse.Namespace) -> OutputOptions:
    """What `output_group` and `parse` found; of a benchmark that knows neither details nor progress."""
    return OutputOptions(given.result_file, given.json, False, False, given.label, given.command)


def batch_options(command: str, description: str, argv: Sequence[str] | None) -> BatchOptions:
    """Parses the flags of `latency` or `throughput`; as `serve_options`."""
    made = parser(command, description)
    latency = command == "latency"
    made.add_argument("--input-len", type=natural, default=32 if latency else 128)
    made.add_argument("--output-len", type=natural, default=128)
    made.add_argument("--batch-size", type=natural, default=8, help="requests at once (latency)")
    made.add_argument("--num-iters", dest="iterations", type=natural, default=30 if latency else 1)
    made.add_argument("--num-iters-warmup", dest="warmup", type=whole, default=10 if latency else 1)
    made.add_argument("--num-prompts", type=natural, default=1000, help="requests in all (throughput)")
    made.add_argument("--max-concurrency", type=natural, help="default: all at once (throughput)")
    return load_options(BatchOptions, made, parse(made, argv))


def load_options(kind: type[OptionsT], made: argparse.ArgumentParser, given: argparse.Namespace) -> OptionsT:
    """What was given for each field of `kind`; a bad combination is explained, and ends the process with status 2."""
    if given.endpoint == "chat" and given.prompt_format == "tokens":
        made.error("--prompt-format tokens: a chat takes text only")
    given.text = given.endpoint == "chat" or given.prompt_format == "text"
    given.target = TargetOptions(**{name: getattr(given, name) for name in TargetOptions._fields})
    given.output = OutputOptions(**{name: getattr(given, name) for name in OutputOptions._fields})
    return kind(**{name: getattr(given, name) for name in kind.__struct_fields__})


# The options of `bench serve`. Names are those of vLLM's `bench serve` where it has them, as aliases at least.


Dataset = Literal["random", "sharegpt", "shared-prefix", "multi-turn"]
VLLM_NAMES: dict[str, Dataset] = {"prefix_repetition": "shared-prefix"}


class ServeOptions(LoadOptions, frozen=True, kw_only=True):
    """The flags of `bench serve`. Lengths are tokens, times seconds."""

    dataset: Dataset
    dataset_path: Path | None
    num_prompts: int
    """Of multi-turn: turns of all conversations."""
    input_len: int
    output_len: int
    output_distribution: LengthDistribution | None
    """Of random: in the place of `output_len` and `range_ratio`."""
    range_ratio: float
    prefixes: PrefixShape
    num_conversations: int
    turns: TurnsShape
    sharegpt_output_len: int | None
    request_rate: float
    """Of multi-turn: conversations that begin."""
    burstiness: float
    max_concurrency: int | None
    goodput: dict[Metric, float]
    percentiles: list[float]


def serve_options(argv: Sequence[str] | None) -> ServeOptions:
    """Parses the flags of `serve`; a bad one is explained, and ends the process with status 2."""
    made = parser("serve", "Requests as clients would make them: latencies and throughput under a given load.")
    _add_dataset(made)
    _add_shared_prefix(made)
    _add_multi_turn(made)
    _add_load(made)
    made.set_defaults(ignore_eos=None)
    given = parse(made, argv)
    given.dataset = VLLM_NAMES.get(given.dataset, given.dataset)
    if given.ignore_eos is None:
        # Behind random tokens a model says anything, often that it has ended: exact lengths are wanted.
        given.ignore_eos = given.dataset == "random"
    _check(made, given)
    given.num_prompts = _number(given)
    given.prefixes = PrefixShape(
        given.num_prefixes, given.prefix_len, given.suffix_len, given.output_len, given.prefix_popularity
    )
    given.turns = TurnsShape(
        given.num_turns, given.system_len, given.user_len, given.output_len, given.range_ratio, given.think_time
    )
    return load_options(ServeOptions, made, given)


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
    data.add_argument(
        "--output-len-distribution",
        dest="output_distribution",
        type=distribution,
        metavar="KIND:LEAST:MOST",
        help="lengths of random's answers: normal:20:500 (BladeLLM's benchmark) or uniform:20:500",
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
    if given.output_distribution is not None and given.dataset != "random":
        made.error(f"--output-len-distribution: of --dataset random, not of {given.dataset}")
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
