"""What the three benchmarks are told, by flags named as in vLLM's benchmarks where they have them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from services.bench.api import Endpoint
from services.bench.core.processor_time import parse_pids
from services.bench.core.statistics import Metric, parse_goodput

Dataset = Literal["random", "sharegpt", "shared-prefix"]


class TargetOptions(NamedTuple):
    """Which server, and how to speak to it."""

    base_url: str
    model: str | None
    api_key: str | None
    endpoint: Endpoint
    timeout: float
    extra_body: dict[str, Any]


class OutputOptions(NamedTuple):
    result_file: Path | None
    json: bool
    detailed: bool
    progress: bool
    label: str | None


class ServeOptions(NamedTuple):
    target: TargetOptions
    output: OutputOptions
    dataset: Dataset
    dataset_path: Path | None
    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float
    prefix_groups: int
    prefix_questions: int
    prefix_len: int
    question_len: int
    sharegpt_output_len: int | None
    text: bool
    """Prompts as text (always for chat), not as token ids."""
    tokenizer: Path | None
    vocab_size: int | None
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    warmup: int
    ignore_eos: bool
    seed: int
    goodput: dict[Metric, float]
    percentiles: list[float]
    cpu: bool
    pids: dict[str, int]


class BatchOptions(NamedTuple):
    """Of `latency` and of `throughput`."""

    target: TargetOptions
    output: OutputOptions
    input_len: int
    output_len: int
    batch_size: int
    iterations: int
    warmup: int
    num_prompts: int
    max_concurrency: int | None
    text: bool
    tokenizer: Path | None
    vocab_size: int | None
    ignore_eos: bool
    seed: int
    cpu: bool
    pids: dict[str, int]


def checked(convert: Callable[[str], Any], allowed: Callable[[Any], bool], expected: str) -> Callable[[str], Any]:
    """An argparse type that says what it expects."""

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not allowed(value):
            raise argparse.ArgumentTypeError(f"{text!r}: {expected} is expected")
        return value

    return parse


natural = checked(int, lambda value: value >= 1, "a whole number from 1")
whole = checked(int, lambda value: value >= 0, "a whole number from 0")
positive = checked(float, lambda value: value > 0, "a number above 0")
fraction = checked(float, lambda value: 0 <= value < 1, "a number from 0 up to, but not, 1")


def json_object(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: a JSON object is expected")
    return value


def percent_list(text: str) -> list[float]:
    try:
        percents = [float(part) for part in text.split(",")]
    except ValueError:
        percents = [-1.0]
    if not all(0 <= percent <= 100 for percent in percents):
        raise argparse.ArgumentTypeError(f"{text!r}: numbers from 0 to 100, comma-separated, are expected")
    return percents


def pid_list(text: str) -> dict[str, int]:
    try:
        return parse_pids(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parser(command: str, description: str) -> argparse.ArgumentParser:
    """The flags that all three have."""
    made = argparse.ArgumentParser(prog=f"bench {command}", description=description)
    target = made.add_argument_group("server")
    target.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    target.add_argument("--model", help="as the server names it; default: the first that it offers")
    target.add_argument("--api-key", help="sent as bearer token")
    target.add_argument("--endpoint", choices=get_args(Endpoint), default="completions", help="default: %(default)s")
    target.add_argument("--timeout", type=positive, default=600.0, help="seconds a request may take")
    target.add_argument("--extra-body", type=json_object, default={}, help="JSON object added to each request")
    target.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=command != "serve")
    prompts = made.add_argument_group("prompts")
    prompts.add_argument(
        "--prompt-format", choices=("tokens", "text"), help="default: tokens for completions; chat is always text"
    )
    prompts.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; default: ask the server")
    prompts.add_argument("--vocab-size", type=natural, help="draw token ids below this; default: ask the server")
    prompts.add_argument("--seed", type=int, default=0)
    output = made.add_argument_group("output")
    output.add_argument("--output-json", "--result-file", dest="result_file", type=Path, help="write the result here")
    output.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    output.add_argument("--detailed", action="store_true", help="with every request's figures in the JSON")
    output.add_argument("--progress", action=argparse.BooleanOptionalAction, default=True, help="show a progress bar")
    output.add_argument("--label", help="kept in the result")
    output.add_argument(
        "--cpu",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="processor seconds by process of a server on this machine",
    )
    output.add_argument("--pids", type=pid_list, default={}, help="NAME=PID,...: its processes; default: found by port")
    return made


def serve_options(argv: Sequence[str] | None) -> ServeOptions:
    """Parses the flags of `serve`; a bad one is explained, and ends the process with status 2."""
    made = parser("serve", "Requests as clients would make them: latencies and throughput under a given load.")
    data = made.add_argument_group("dataset")
    data.add_argument("--dataset", "--dataset-name", choices=get_args(Dataset), default="random")
    data.add_argument("--dataset-path", type=Path, help="file of the sharegpt dataset")
    data.add_argument("--num-prompts", type=natural, help="default: 1000; shared-prefix: groups × questions")
    data.add_argument("--random-input-len", "--input-len", dest="input_len", type=natural, default=128)
    data.add_argument("--random-output-len", "--output-len", dest="output_len", type=natural, default=128)
    data.add_argument("--random-range-ratio", dest="range_ratio", type=fraction, default=0.0)
    data.add_argument("--prefix-groups", type=natural, default=8)
    data.add_argument("--prefix-questions", type=natural, default=16)
    data.add_argument("--prefix-len", type=natural, default=512)
    data.add_argument("--question-len", type=natural, default=64)
    data.add_argument("--sharegpt-output-len", type=natural, help="default: as long as the real answer")
    load = made.add_argument_group("load")
    load.add_argument("--request-rate", type=positive, default=float("inf"), help="requests/s; default: %(default)s")
    load.add_argument("--burstiness", type=positive, default=1.0, help="1: Poisson; less: burstier; more: steadier")
    load.add_argument("--max-concurrency", type=natural)
    load.add_argument("--warmup", "--num-warmups", dest="warmup", type=whole, default=1, help="requests made before")
    made.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="ttft, tpot, e2el objectives")
    made.add_argument("--percentiles", "--metric-percentiles", type=percent_list, default=[99.0])
    given = made.parse_args(argv)
    if given.dataset == "sharegpt" and given.dataset_path is None:
        made.error("--dataset sharegpt needs --dataset-path")
    if given.dataset == "shared-prefix" and given.num_prompts is not None:
        made.error("--num-prompts: shared-prefix makes --prefix-groups × --prefix-questions prompts")
    try:
        given.goodput = parse_goodput(given.goodput)
    except ValueError as error:
        made.error(f"--goodput: {error}")
    if given.num_prompts is None:
        shared = given.dataset == "shared-prefix"
        given.num_prompts = given.prefix_groups * given.prefix_questions if shared else 1000
    return ServeOptions(**_fields(made, given, ServeOptions))


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
    return BatchOptions(**_fields(made, made.parse_args(argv), BatchOptions))


def _fields(
    made: argparse.ArgumentParser, given: argparse.Namespace, options: type[ServeOptions] | type[BatchOptions]
) -> dict[str, Any]:
    """What was given, under the names of `options`' fields."""
    if given.endpoint == "chat" and given.prompt_format == "tokens":
        made.error("--prompt-format tokens: a chat takes text only")
    given.text = given.endpoint == "chat" or given.prompt_format == "text"
    given.target = TargetOptions(**{name: getattr(given, name) for name in TargetOptions._fields})
    given.output = OutputOptions(**{name: getattr(given, name) for name in OutputOptions._fields})
    return {name: getattr(given, name) for name in options._fields}
