"""`bench perplexity`: how well a model predicts a text with each way to round its weights.

Perplexity is e to the mean negative log-likelihood of a text's tokens. Of each text, windows of `--max-length` tokens
are scored, each `--stride` tokens behind the one before; a token counts once, in the first window that has it, so that
it is predicted from at least max-length - stride tokens where there are so many. A text's first token is not predicted.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, fsum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from tokenizers import Tokenizer

from services.bench.engine.process import single_engine
from services.bench.engine.requests import EngineClient
from services.bench.errors import BenchError
from services.bench.options import model_arguments, natural, output_group, output_options, parse
from services.bench.report import Report, Table, machine_line
from shared.ids import RequestId
from shared.messages.detokenizer import TokenBatch
from shared.messages.gateway import GatewayMessage
from shared.messages.generation import StopConditions
from shared.messages.scheduler import WorkerResult

SCHEMES = ("auto", "int8", "w8a8_int8", "int4", "fp8", "w8a8_fp8")
HEADS = ("weights", "perplexity", "nats per token", "against the first", "tokens")
OPEN_WINDOWS = 16
"""Requests at a time."""
WINDOW_TIMEOUT = 600.0
"""Seconds in which one more window must be scored."""


def scheme_list(text: str) -> list[str]:
    """An argparse type: values of the worker's `--quantization`, comma-separated."""
    names = text.split(",")
    if not set(names) <= set(SCHEMES):
        raise argparse.ArgumentTypeError(f"{text!r}: of {', '.join(SCHEMES)}, comma-separated, are expected")
    return names


class TextWindow(NamedTuple):
    """A part of a text that is computed at once."""

    tokens: list[int]
    scored: int
    """So many of its last tokens count."""


def windows(tokens: list[int], length: int, stride: int, first: int = 1) -> list[TextWindow]:
    """Every token from the one at `first`, which is not the text's first, is scored in exactly one window of at most
    `length`."""
    made, end = [], first
    for start in range(0, len(tokens), stride):
        last = min(start + length, len(tokens))
        if last > end:
            made.append(TextWindow(tokens[start:last], min(last - end, last - start - 1)))
            end = last
    return made


class _Record(Struct):
    """A line of a file of texts."""

    completion: str
    prompt: str = ""


class _Text(NamedTuple):
    tokens: list[int]
    first: int
    """The first token that counts."""


def perplexity_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the flags; a bad one is explained, and ends the process with status 2."""
    parser = argparse.ArgumentParser("baton bench perplexity", description=__doc__)
    model_arguments(parser, "Model directory; by default the demo model.")
    parser.add_argument(
        "--text",
        type=Path,
        help='A text; or JSON lines of {"prompt", "completion"}, of which the completion counts. By default questions '
        "and answers that were kept from the demo model's training.",
    )
    parser.add_argument(
        "--quantization",
        type=scheme_list,
        default=list(SCHEMES),
        help=f"{','.join(SCHEMES)}: one after the other.",
    )
    parser.add_argument("--stride", type=natural, help="Tokens; by default half of --max-length.")
    parser.add_argument("--max-length", type=natural, help="Tokens of a window; by default what the model can.")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=natural, help="CPU threads of the worker.")
    output_group(parser)
    return parse(parser, argv)


async def main(argv: Sequence[str]) -> int:
    """The exit code: 0. Rows are printed, and the file written, as they are measured. Raises BenchError."""
    options = perplexity_options(argv)
    if options.model is None or options.text is None:
        raise BenchError("a model and a text are needed: baton bench has both")
    if options.max_length is not None and not 1 < options.max_length > (options.stride or 1):
        raise BenchError(f"--max-length {options.max_length}: 2 tokens at least are needed, and more than --stride")
    folder = Path(options.model)
    texts = _texts(options.text, folder / "tokenizer.json")
    report, table = Report(output_options(options)), Table(HEADS)
    name = options.model_name or folder.name
    found: dict[str, Any] = {"model": name, "dtype": options.dtype, "text": options.text.name, "perplexity": []}
    for scheme in options.quantization:
        losses = await _losses(options, scheme, texts)
        figures = _figures(scheme, losses, found["perplexity"])
        if not found["perplexity"]:
            report.show(f"{name} in {options.dtype} on {machine_line()}: {options.text.name}\n\n{table.head()}")
        found["perplexity"].append(figures)
        report.show(table.row(_cells(figures)))
        report.keep(found)
    report.end(found)
    return 0


def _texts(path: Path, tokenizer: Path) -> list[_Text]:
    """Raises BenchError where there are none."""
    encoder = Tokenizer.from_file(str(tokenizer))
    try:
        text = path.read_text(encoding="utf-8")
        lines = list(filter(None, text.split("\n"))) if path.suffix == ".jsonl" else []
        records = [msgspec.json.decode(line, type=_Record) for line in lines] or [_Record(text)]
    except (OSError, ValueError) as error:  # not UTF-8, no such records
        raise BenchError(f"{path}: {error}") from None
    texts = []
    for record in records:
        prompt = list(encoder.encode(record.prompt).ids) if record.prompt else []
        tokens = prompt + list(encoder.encode(record.completion, add_special_tokens=not prompt).ids)
        texts.append(_Text(tokens, max(1, len(prompt))))
    if not any(len(each.tokens) > each.first for each in texts):
        raise BenchError(f"{path}: a text of two tokens or more is needed")
    return texts


async def _losses(options: argparse.Namespace, scheme: str, texts: list[_Text]) -> list[float]:
    """Of every scored token, by an engine of its own."""
    given = {"threads": options.threads, "dtype": options.dtype, "device": options.device, "kv-memory": "256MiB"}
    worker = {"model": options.model, "quantization": scheme} | {
        name: str(value) for name, value in given.items() if value is not None
    }
    async with single_engine(options.nats_server, {}, worker) as (bus, engine, card):
        length = options.max_length or card.max_model_len - 1
        stride = options.stride or length // 2
        if length >= card.max_model_len:
            raise BenchError(f"--max-length {length}: at most {card.max_model_len - 1}, as one more token is drawn")
        if stride >= length:
            raise BenchError(f"--stride {stride}: less than the {length} tokens of a window are needed")
        scores = PromptScores(bus, engine, card)
        await scores.listen()
        parts = [windows(text.tokens, length, stride, text.first) for text in texts]
        return await scores.score([window for part in parts for window in part])


def _figures(scheme: str, losses: list[float], before: list[dict[str, Any]]) -> dict[str, Any]:
    mean = fsum(losses) / len(losses)
    perplexity = exp(mean)
    first = before[0]["perplexity"] if before else perplexity
    return {
        "quantization": scheme,
        "perplexity": perplexity,
        "nats_per_token": mean,
        "against_first": perplexity / first - 1,
        "tokens": len(losses),
    }


def _cells(figures: dict[str, Any]) -> list[str]:
    return [
        figures["quantization"],
        f"{figures['perplexity']:.4f}",
        f"{figures['nats_per_token']:.5f}",
        f"{figures['against_first']:+.2%}",
        f"{figures['tokens']:,}",
    ]


@dataclass
class PromptScores(EngineClient):
    """Owns the log-probabilities of the windows under way."""

    _scores: dict[RequestId, dict[int, float]] = field(default_factory=dict)
    """By position; what is computed again after a preemption takes its own place."""
    _done: asyncio.Queue[RequestId] = field(default_factory=asyncio.Queue)

    async def score(self, parts: Sequence[TextWindow]) -> list[float]:
        """The negative log-likelihood of every scored token, window by window. Raises BenchError if the engine refuses
        one, or takes too long."""
        losses: list[list[float]] = [[] for _ in parts]
        waiting, running = list(enumerate(parts))[::-1], dict[RequestId, int]()
        while waiting or running:
            while waiting and len(running) < OPEN_WINDOWS:
                number, window = waiting.pop()
                request = await self._publish(window.tokens, 0.0, StopConditions(max_tokens=1), prompt_logprobs=0)
                running[request] = number
            ended = await self._next_end()
            number = running.pop(ended)
            losses[number] = self._of(ended, parts[number])
        return [loss for part in losses for loss in part]

    async def _next_end(self) -> RequestId:
        try:
            async with asyncio.timeout(WINDOW_TIMEOUT):
                ended = await self._done.get()
        except TimeoutError:
            raise BenchError(f"no window was scored in {WINDOW_TIMEOUT:.0f} s") from None
        if self._refused is not None:
            raise BenchError(f"the engine refuses: {self._refused}")
        return ended

    def _of(self, request: RequestId, window: TextWindow) -> list[float]:
        scores, size = self._scores.pop(request, {}), len(window.tokens)
        try:
            return [-scores[position] for position in range(size - window.scored, size)]
        except KeyError as missing:
            raise BenchError(f"the engine gave no log-probability of a prompt's token {missing}") from None

    async def _on_tokens(self, batch: TokenBatch) -> None:
        for part in batch.scored:
            known = self._scores.setdefault(part.request, {})
            known.update((part.position + at, each.logprob) for at, each in enumerate(part.logprobs))
        for entry in batch.entries:
            if entry.finish is not None and entry.request in self._open:
                self._open.discard(entry.request)
                self._done.put_nowait(entry.request)

    async def _on_gateway(self, message: GatewayMessage) -> None:
        await super()._on_gateway(message)
        if self._refused is not None:
            self._done.put_nowait(RequestId(""))

    async def _on_result(self, result: WorkerResult) -> None:
        """Says nothing of prompts."""
