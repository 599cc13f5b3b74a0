"""What benchmarks of a server are told, by flags named as in vLLM's benchmarks where they have them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from services.bench.api import Endpoint
from services.bench.core.processor_time import parse_pids


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


ALWAYS_FULL = ("latency", "throughput", "interference")
"""Commands whose answers have their full length unless told otherwise."""


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
not_negative = checked(float, lambda value: 0 <= value < float("inf"), "a number from 0")
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


def output_group(made: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Where every benchmark's result goes."""
    output = made.add_argument_group("output")
    output.add_argument("--output-json", "--result-file", dest="result_file", type=Path, help="write the result here")
    output.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    output.add_argument("--label", help="kept in the result")
    return output


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
    return BatchOptions(**fields(made, made.parse_args(argv), BatchOptions._fields))


def fields(made: argparse.ArgumentParser, given: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """What was given for each of `names`."""
    if given.endpoint == "chat" and given.prompt_format == "tokens":
        made.error("--prompt-format tokens: a chat takes text only")
    given.text = given.endpoint == "chat" or given.prompt_format == "text"
    given.target = TargetOptions(**{name: getattr(given, name) for name in TargetOptions._fields})
    given.output = OutputOptions(**{name: getattr(given, name) for name in OutputOptions._fields})
    return {name: getattr(given, name) for name in names}
