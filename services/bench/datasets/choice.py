"""Makes the prompts that the options ask for."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import NamedTuple

from services.bench.api import Api, Prompt
from services.bench.datasets.local_tokenizer import LocalTokenizer
from services.bench.datasets.random_lengths import random_prompts
from services.bench.datasets.shared_prefix import shared_prefix_prompts
from services.bench.datasets.sharegpt import read_conversations, sharegpt_prompts
from services.bench.datasets.writers import TextWriter, TokenWriter, Writer, seen_vocabulary, text_writer
from services.bench.options import ServeOptions


class Prompts(NamedTuple):
    warm_up: list[Prompt]
    """Others than the measured ones, so that these do not find themselves cached."""
    measured: list[Prompt]


async def make_writer(api: Api, text: bool, tokenizer: Path | None, vocab_size: int | None) -> TextWriter | TokenWriter:
    """A writer by what is known of the vocabulary: the local tokenizer, else the size given, else the server."""
    local = LocalTokenizer(tokenizer) if tokenizer is not None else None
    if text:
        return await text_writer(local.count if local else api.count, chat=api.endpoint == "chat")
    if local is not None:
        return TokenWriter(local.vocabulary())
    return TokenWriter(range(vocab_size) if vocab_size else await seen_vocabulary(api.tokenize))


async def make_prompts(options: ServeOptions, api: Api) -> Prompts:
    """The prompts of one run; the same for the same options and tokenizer. Raises ApiError."""
    random = Random(options.seed)
    if options.dataset == "sharegpt":
        return await _sharegpt(options, api, random)
    writer = await make_writer(api, options.text, options.tokenizer, options.vocab_size)
    if options.dataset == "shared-prefix":
        return await _shared_prefix(options, writer, random)
    warm_up = await random_prompts(writer, options.warmup, options.input_len, options.output_len, 0.0, random)
    measured = await random_prompts(
        writer, options.num_prompts, options.input_len, options.output_len, options.range_ratio, random
    )
    return Prompts(warm_up, measured)


async def _sharegpt(options: ServeOptions, api: Api, random: Random) -> Prompts:
    assert options.dataset_path is not None
    count = LocalTokenizer(options.tokenizer).count if options.tokenizer else api.count
    prompts = await sharegpt_prompts(
        read_conversations(options.dataset_path),
        count,
        options.warmup + options.num_prompts,
        api.endpoint == "chat",
        options.sharegpt_output_len,
        random,
    )
    return Prompts(prompts[: options.warmup], prompts[options.warmup :])


async def _shared_prefix(options: ServeOptions, writer: Writer, random: Random) -> Prompts:
    async def groups(number: int, questions: int) -> list[Prompt]:
        lengths = options.prefix_len, options.question_len, options.output_len
        return await shared_prefix_prompts(writer, number, questions, *lengths, random)

    return Prompts(await groups(1, options.warmup), await groups(options.prefix_groups, options.prefix_questions))
