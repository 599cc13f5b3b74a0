"""Makes the prompts that the options ask for."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import NamedTuple

from services.bench.api import Api, Prompt
from services.bench.datasets.local_tokenizer import LocalTokenizer
from services.bench.datasets.multi_turn import Script, scripts
from services.bench.datasets.random_lengths import random_prompts
from services.bench.datasets.shared_prefix import shared_prefix_prompts
from services.bench.datasets.sharegpt import read_conversations, sharegpt_prompts
from services.bench.datasets.writers import TextWriter, TokenWriter, Writer, seen_vocabulary, text_writer
from services.bench.serve_options import ServeOptions


class Prompts(NamedTuple):
    warm_up: list[Prompt]
    """Others than the measured ones, so that these do not find themselves cached."""
    measured: list[Prompt]


class Conversations(NamedTuple):
    warm_up: list[Prompt]
    measured: list[Script]


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
    other = options.prefixes._replace(prefixes=1)
    return Prompts(
        await shared_prefix_prompts(writer, other, options.warmup, random),
        await shared_prefix_prompts(writer, options.prefixes, options.num_prompts, random),
    )


async def make_conversations(options: ServeOptions, api: Api) -> Conversations:
    """What users say in the conversations of one run; as `make_prompts`."""
    random, chat = Random(options.seed), api.endpoint == "chat"
    writer = await make_writer(api, True, options.tokenizer, None)
    assert isinstance(writer, TextWriter), "asked for text"
    others = await scripts(writer, options.turns._replace(turns=1), options.warmup, random)
    measured = await scripts(writer, options.turns, options.num_conversations, random)
    return Conversations([script.prompt([], chat) for script in others], measured)
