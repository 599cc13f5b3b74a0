"""The file in which `baton bench profile` keeps how long an engine takes for prompts and for decode steps, and which
`baton plan --profile` reads.

It is a JSON object: `format`, `version`, `engine` (what was measured), `prefill` and `decode` (lists of points), and
beside them the head that every benchmark's result has. The version rises when a reader of the one before would
misunderstand it; fields that a reader does not know it leaves out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shared.packing import NOT_DECODED

FORMAT = "baton-engine-profile"
VERSION = 1

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class ProfileError(ValueError):
    """A file is no profile, or not one that can be used. The text names the file and what is wrong."""


class MeasuredEngine(Struct, frozen=True, kw_only=True):
    """The engine that was measured: what its times depend on."""

    model: str
    device: str
    """As its worker reports it."""
    gpus: Count
    """Its ranks."""
    block_size: Count
    max_num_seqs: Count
    max_batch_tokens: Count
    """Most tokens of one step: longer prompts are computed in chunks of it."""
    kv_tokens: Count
    """Tokens that its KV memory holds."""


class PrefillPoint(Struct, frozen=True, kw_only=True):
    """What a prompt of a length took, on an engine that did nothing else."""

    prompt_tokens: Count
    """None of them cached."""
    seconds: Seconds
    """From its coming to the engine to its first token; the median of its repetitions."""


class DecodePoint(Struct, frozen=True, kw_only=True):
    """What lay between two tokens of each sequence of a batch that only decoded."""

    batch_size: Count
    context_tokens: Count
    """Of each sequence, on average over the measurement."""
    itl_seconds: Seconds
    """The median of its repetitions, each a mean over its tokens."""


class ProfileFile(Struct, frozen=True, kw_only=True):
    """The part of the file that is read again. Points are in no order, and none is twice."""

    engine: MeasuredEngine
    prefill: Annotated[tuple[PrefillPoint, ...], Meta(min_length=2)]
    decode: Annotated[tuple[DecodePoint, ...], Meta(min_length=4)]
    """Batches of two sizes at least, each of two contexts at least; those that the engine's memory does not hold are
    left out: of a batch size those behind the longest context that it holds."""
    format: str = FORMAT
    version: int = VERSION

    def __post_init__(self) -> None:
        lengths = [point.prompt_tokens for point in self.prefill]
        cells = [(point.batch_size, point.context_tokens) for point in self.decode]
        for name, places in (("prefill", lengths), ("decode", cells)):
            if len(set(places)) < len(places):
                raise ValueError(f"{name}: a point is there twice")
        contexts = sorted({context for _, context in cells})
        for batch in {batch for batch, _ in cells}:
            own = sorted(context for each, context in cells if each == batch)
            if own != contexts[: len(own)]:
                raise ValueError(f"decode: of batch size {batch} a context below {own[-1]} is missing")
        smallest = min(batch for batch, _ in cells)
        if (smallest, contexts[-1]) not in cells:
            raise ValueError(f"decode: of the smallest batch, {smallest}, context {contexts[-1]} is missing")
        if len({batch for batch, _ in cells}) < 2 or len(contexts) < 2:
            raise ValueError("decode: two batch sizes and two contexts are needed")


class _Version(Struct):
    """The part that every version has."""

    format: str
    version: int


def read_profile(path: Path) -> ProfileFile:
    """Raises ProfileError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror}") from None
    try:
        head = msgspec.json.decode(data, type=_Version)
    except NOT_DECODED as error:
        raise ProfileError(f"{path}: is no profile of baton bench profile ({error})") from None
    if head.format != FORMAT:
        raise ProfileError(f"{path}: format {head.format!r}: {FORMAT!r} is expected")
    if head.version != VERSION:
        raise ProfileError(f"{path}: version {head.version}: this release reads version {VERSION}; profile it again")
    try:
        return msgspec.json.decode(data, type=ProfileFile)
    except NOT_DECODED as error:  # what a struct itself refuses is one of these, too
        raise ProfileError(f"{path}: {error}") from None
