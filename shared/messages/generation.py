"""A client's request as it travels from the tokenizer to the worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise
from math import prod
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from shared.ids import (
    Attempt,
    Count,
    EngineId,
    GatewayId,
    GrammarKey,
    InstanceId,
    LoraId,
    ModelName,
    NodeId,
    RequestId,
    RowsName,
    TokenId,
)
from shared.messages.dialects import Thinking

MAX_FLOAT = sys.float_info.max
"""No infinity, and NaN neither."""
Penalty = Annotated[float, Meta(ge=-2, le=2)]
LogprobCount = Annotated[int, Meta(ge=0, le=2**16)]
"""How many most likely tokens; a gateway allows 1000 at most."""
EXPECTED_OUTPUT = 256
"""Output tokens that a request without `max_tokens` counts for."""

FinishReason = Literal["stop", "length", "abort"]
"""OpenAI's words. A cancelled or failed request never finishes; it is rejected or failed."""


class Grammar(Struct, frozen=True, array_like=True):
    """What the output must match: guided decoding. Equal grammars are compiled once."""

    kind: Literal["json", "regex", "choice", "grammar", "structural_tag"]
    text: str
    """A JSON schema, a regular expression, a JSON array of strings, EBNF in xgrammar's syntax, or xgrammar's structural
    tag."""
    after: str = ""
    """The grammar applies after the first occurrence of this text in the output (`</think>`); empty: from the start."""
    compact: bool = False
    """For JSON: the only white space allowed is one space behind each comma and colon. More of the output is then
    forced."""

    @property
    def key(self) -> GrammarKey:
        """Names what is compiled, 16 bytes: the same for equal grammars, wherever in the output they apply."""
        return GrammarKey(blake2b(f"{self.kind} {self.compact:d} {self.text}".encode(), digest_size=16).digest())


class SamplingOptions(Struct, frozen=True, array_like=True, kw_only=True):
    """How the next token is drawn. A pure function of (logits, seed, output position): no generator state.

    Ranges are checked by the gateway; defaults are OpenAI's, for the additions vLLM's.
    """

    seed: Count
    """63 bits; the gateway draws one when the client gave none and keeps it over every attempt."""
    temperature: Annotated[float, Meta(ge=0, le=MAX_FLOAT)] = 1.0
    """0 means greedy decoding."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Count = 0
    """0 keeps every token."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=MAX_FLOAT)] = 1.0
    logit_bias: tuple[tuple[TokenId, Annotated[float, Meta(ge=-100, le=100)]], ...] = ()
    logprobs: LogprobCount | None = None
    """None: no log-probabilities. N: the sampled token's and those of the N most likely."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """Token sequences; the last token of each is never drawn behind its other tokens."""
    allowed_token_ids: tuple[TokenId, ...] | None = None
    """The only tokens that may be drawn; None allows all."""
    logprob_token_ids: tuple[TokenId, ...] | None = None
    """Log-probabilities of these tokens are reported beside the sampled token's, in place of the most likely ones;
    None: the most likely ones."""
    prompt_logprobs: LogprobCount | None = None
    """None: no log-probabilities of the prompt. N: those of each prompt token but the first, and of the N most likely
    tokens there."""
    thinking_budget: Count | None = None
    """Number of reasoning tokens after which `thinking_end` is forced, unless it has occurred; None: no limit."""
    thinking_end: tuple[TokenId, ...] = ()
    """The tokens that close the reasoning; empty without a `thinking_budget`."""
    thinking_start: tuple[TokenId, ...] = ()
    """Reasoning begins behind the first occurrence of these tokens in the output; empty: at the start of the output."""
    extra_args: bytes = b""
    """What logits processors of plug-ins are asked for, a JSON object; empty: nothing."""


PoolingType = Literal["last", "mean", "cls", "max", "mean_sqrt_len", "weighted_mean", "all"]
"""Which hidden states of a prompt become its vector. last: that of its last token. mean: their mean. cls: that of its
first token. max: the largest of each element. mean_sqrt_len: their sum, divided by the square root of their number.
weighted_mean: their mean, where the first counts once, the second twice, and so on. all: each becomes a vector of its
own; these follow one another in the prompt's order."""


class PoolingOptions(Struct, frozen=True, array_like=True, kw_only=True):
    """How the hidden states of a prompt's tokens, behind the model's last norm, become one vector (an embedding)."""

    pooling: PoolingType
    dimensions: Annotated[int, Meta(ge=1)]
    """The number of its elements: so many of the first ones are kept, before it is normalized."""
    normalize: bool = True
    """Whether the vector is divided by its Euclidean norm."""
    whole: bool = False
    """Whether the prompt is computed in one step, as each of its tokens sees those behind it, too."""
    step_tag_id: TokenId | None = None
    """With "all": only the tokens that are this one become vectors (step pooling: it ends each step of a solution);
    None: every token does."""

    def vectors(self, prompt: Sequence[int]) -> int:
        """How many vectors the tokens of a prompt become."""
        if self.pooling != "all":
            return 1
        return len(prompt) if self.step_tag_id is None else prompt.count(self.step_tag_id)

    @property
    def computes_all(self) -> bool:
        """Whether every token of the prompt has to be computed, so that none may come from a cache."""
        return self.whole or self.pooling != "last"


EmbeddingDtype = Literal["float32", "float16", "bfloat16"]
EMBEDDING_BYTES: dict[EmbeddingDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Of one element."""
MAX_PROMPT_EMBEDS_BYTES = 6 * 2**20
"""Of one prompt's embeddings. They travel with the request and its plan, which have to fit the bus beside all else."""
MAX_MEDIA_BYTES = 128 * 2**20
"""Of the rows of one prompt's images, which lie in shared memory: 4,096 rows of Qwen3-VL 8B."""


POSITION_AXES = 3
"""Of m-RoPE (Qwen2-VL, arXiv:2409.12191): frames, rows and columns. A text's tokens have the same position on each."""
GridSide = Annotated[int, Meta(ge=1, le=2**20)]
PATCHED_FRAMES = 2
"""Frames of a video that make one row of squares (`temporal_patch_size` of Qwen's models)."""
MAX_FRAME_OFFSET = 2**20
"""Of the last frames of a video, in positions."""
FrameOffset = Annotated[int, Meta(ge=0, le=MAX_FRAME_OFFSET)]
ImageGrid = tuple[GridSide, GridSide, GridSide]
"""Frames, rows and columns of the tokens that stand for an image, the columns of a row behind each other."""


class MediaRows(Struct, frozen=True, array_like=True):
    """Rows that an encoder keeps beside the bus, see `shared/media`."""

    name: RowsName
    """Names them by their contents, so that the same rows are the same prefix wherever they were made."""
    count: Annotated[int, Meta(ge=1, le=2**20)]
    owner: InstanceId
    """The encoder that keeps them, as long as somebody says that they are needed."""
    path: str = ""
    """The file in which the engine's scheduler holds them for its ranks; empty before it has the request."""


class PromptEmbeds(Struct, frozen=True, array_like=True, kw_only=True):
    """What a prompt has in place of the embeddings of some of its tokens, whose ids are 0 and mean nothing."""

    dtype: EmbeddingDtype
    size: Annotated[int, Meta(ge=1)]
    """Elements of a row, as many as the model's hidden states have."""
    rows: Annotated[bytes, Meta(max_length=MAX_PROMPT_EMBEDS_BYTES)]
    """Little-endian, one row behind the other."""
    runs: tuple[tuple[int, int], ...] = ()
    """Tokens that have rows: the first of each run, and how many follow each other. None: all tokens of the prompt."""
    grids: tuple[ImageGrid | None, ...] = ()
    """How the tokens of each run lie in an image, for models whose positions have three axes (m-RoPE); None: as those
    of a text. None at all: all runs are like that."""
    mutual: tuple[bool, ...] = ()
    """Of each run, whether its tokens see each other, those behind them too (Gemma 3's images): a step that computes
    some computes all that are left. None at all: no run is like that."""
    media: tuple[MediaRows | None, ...] = ()
    """Of each run, where its rows are kept; None: they are the next ones in `rows`. None at all: all are there."""
    encoded: bool = False
    """Whether the rows stand beside the prompt instead of in it: what an encoder made of a sound (Whisper) or of images
    (Llama 3.2 Vision), to which tokens attend in layers of their own (cross-attention). The prompt's tokens are its own
    then, and runs say from which token on so many rows are seen (`shared.media.seen_rows`)."""
    offsets: tuple[FrameOffset | None, ...] = ()
    """Of each run with a grid that goes on with the video of the run before it: how far its frame is behind the first
    one, as a position on the axis of frames. None: it begins an image or a video. None at all: all runs do."""
    texts: tuple[tuple[int, tuple[TokenId, ...]], ...] = ()
    """Tokens of text that a model's processor writes for an image: the first of each piece, ascending, and their ids.
    Those within a run have no rows: the run's rows lie around them. Of what an encoder answers also those before and
    behind its run, all of them places from the image's first token on."""

    @property
    def row_bytes(self) -> int:
        """Of one token."""
        return self.size * EMBEDDING_BYTES[self.dtype]

    @property
    def count(self) -> int:
        """How many tokens have rows; of rows that are not whole the last one does not count."""
        return len(self.rows) // self.row_bytes + sum(each.count for each in self.media if each is not None)

    @property
    def kept(self) -> list[MediaRows]:
        """The rows that are kept elsewhere, in the order of their runs."""
        return [each for each in self.media if each is not None]

    def of_tokens(self, first: int, end: int) -> bytes:
        """See :class:`shared.blocks.InPlaceOfTokens`. Rows beside the prompt are of the block from which on they are
        seen, behind which all others go on."""
        if self.encoded:
            return self._beside_tokens(first, end)
        if not self.runs:
            rows = self.rows[first * self.row_bytes : end * self.row_bytes]
            return self.dtype.encode() + rows if rows else b""
        parts, row = [], 0
        grids, mutual = self.grids or (None,) * len(self.runs), self.mutual or (False,) * len(self.runs)
        media, offsets = self.media or (None,) * len(self.runs), self.offsets or (None,) * len(self.runs)
        for (start, count), grid, whole, kept, offset in zip(self.runs, grids, mutual, media, offsets, strict=True):
            low, high = max(first, start), min(end, start + count)
            if low < high:
                place = (low - first).to_bytes(2, "little") + (high - first).to_bytes(2, "little")
                place += b"".join(side.to_bytes(4, "little") for side in grid or ())  # equal rows may lie otherwise
                place += b"" if offset is None else b"behind" + offset.to_bytes(4, "little")
                if kept is not None:  # its name stands for all of it
                    parts.append(b"%brows:%b%d" % (place, kept.name, low - start))
                    continue
                at = row + low - start - self._texts_between(start, low)
                behind = at + high - low - self._texts_between(low, high)
                if whole and low == start:  # its first tokens have seen all of it
                    parts.append(self.rows[row * self.row_bytes : (row + count) * self.row_bytes])
                parts += [place, self.rows[at * self.row_bytes : behind * self.row_bytes]]
            row += 0 if kept is not None else count - self._texts_between(start, start + count)
        return self.dtype.encode() + b"".join(parts) if parts else b""

    def _beside_tokens(self, first: int, end: int) -> bytes:
        parts, row = [], 0
        runs = self.runs or ((0, self.count),)
        for (token, count), kept in zip(runs, self.media or (None,) * len(runs), strict=True):
            behind = row + (count if kept is None else 0)
            if first <= token < end:
                own = self.rows[row * self.row_bytes : behind * self.row_bytes]
                parts.append(own if kept is None else b"rows:%b" % kept.name)
            row = behind
        return b"encoded" + self.dtype.encode() + b"".join(parts) if parts else b""

    def fits(self, prompt_length: int) -> bool:
        """Whether each row has its token of a prompt of this length: all of them, or runs that follow each other; and
        what is said of runs is said of each, grids are as large, and those of a video follow each other. Of rows beside
        the prompt all runs together have them, each from another token on."""
        if self.encoded:
            return self._fits_beside(prompt_length)
        said = (self.grids, self.mutual, self.media, self.offsets)
        if any(each and len(each) != len(self.runs) for each in said) or not self._videos_fit():
            return False
        if any(grid and prod(grid) != count for grid, (_, count) in zip(self.grids, self.runs, strict=False)):
            return False
        if not self.runs:
            return len(self.rows) == prompt_length * self.row_bytes
        end = rows = 0
        for (start, count), kept in zip(self.runs, self.media or (None,) * len(self.runs), strict=True):
            own = count - self._texts_between(start, start + count)
            if own < 1 or start < end or (kept is not None and kept.count != own):
                return False
            end, rows = start + count, rows + (own if kept is None else 0)
        return end <= prompt_length and len(self.rows) == rows * self.row_bytes

    def _fits_beside(self, prompt_length: int) -> bool:
        own = self.count - sum(each.count for each in self.kept)
        if self.grids or self.mutual or self.offsets or self.texts or self.count < 1:
            return False
        runs, tokens = self.runs or ((0, self.count),), [-1, *(token for token, _ in self.runs)]
        media = self.media or (None,) * len(runs)
        if len(media) != len(runs) or any(
            count < 1 or (kept is not None and kept.count != count)
            for (_, count), kept in zip(runs, media, strict=True)
        ):
            return False
        ordered = all(one < other for one, other in pairwise(tokens)) and tokens[-1] < prompt_length
        whole = sum(count for _, count in runs) == self.count
        return ordered and whole and len(self.rows) == own * self.row_bytes

    def _texts_between(self, first: int, end: int) -> int:
        """Tokens of `texts` from `first` up to `end`."""
        return sum(max(0, min(end, at + len(ids)) - max(first, at)) for at, ids in self.texts)

    def _videos_fit(self) -> bool:
        """Whether each run that goes on with a video is behind one of its kind, with nothing between."""
        return all(
            offset is None or (place > 0 and self.grids and self.grids[place] is not None and self._follows(place))
            for place, offset in enumerate(self.offsets)
        )

    def _follows(self, place: int) -> bool:
        return self.grids[place] == self.grids[place - 1] and sum(self.runs[place - 1]) == self.runs[place][0]


def mutual_run(embeds: PromptEmbeds | None, token: int) -> tuple[int, int] | None:
    """(first, end) of the run around a token, where its tokens see each other; None elsewhere."""
    if embeds is None or not embeds.mutual:
        return None
    for (start, count), mutual in zip(embeds.runs, embeds.mutual, strict=True):
        if mutual and start <= token < start + count:
            return start, start + count
    return None


class StopConditions(Struct, frozen=True, array_like=True, kw_only=True):
    """When a generation ends."""

    max_tokens: Count | None = None
    """Maximum number of output tokens, counting those of earlier attempts; None: as many as fit the context."""
    min_tokens: Count = 0
    """No stop token is drawn, and no stop string looked for, before this many output tokens."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    """Whether a stop string that was hit is part of the text."""

    @property
    def expected_tokens(self) -> int:
        """How many output tokens a request counts for before it has any, where shares and limits are kept."""
        return EXPECTED_OUTPUT if self.max_tokens is None else self.max_tokens

    def within(self, prompt_length: int, context: int) -> StopConditions:
        """These with a limit that a context of that many tokens has room for behind the prompt, as in vLLM: agents send
        one limit with prompts that grow. A limit above the whole context, and one behind a prompt that leaves no room,
        stay as they are, to be refused."""
        wanted, room = self.max_tokens, context - prompt_length
        if wanted is None or not 0 < room < wanted <= context:
            return self
        return replace(self, max_tokens=room)


class KeptPrompt(Struct, frozen=True, array_like=True):
    """Where the blocks of a prompt are kept that an engine has computed for a later request."""

    engine: EngineId
    """The one that keeps them, until it is told that they were used."""
    request: RequestId
    """The request that had them computed."""
    node: NodeId
    """The node whose KV store has them."""


StreamInterval = Annotated[int, Meta(ge=1, le=1024)]
"""Steps whose tokens are sent together, as far as they are fast; the first token is sent at once, as is the last. Each
step's at once where there are stop strings, which only the detokenizer finds."""


class Generation(Struct, frozen=True, array_like=True, kw_only=True):
    """One sequence to generate: tokenized, hashed, on its way to an engine."""

    request: RequestId
    attempt: Attempt
    gateway: GatewayId
    model: ModelName
    tokens: bytes
    """Packed uint32: the prompt, then the output tokens that earlier attempts already gave the client."""
    prompt_length: Count
    """Tokens of the prompt; whatever follows in `tokens` is output of earlier attempts."""
    block_hashes: bytes
    """16 bytes for each full block of `tokens`; empty without `prefix_caching`."""
    sampling: SamplingOptions
    stopping: StopConditions
    sent_chars: Count = 0
    """Characters of output text that the client already has."""
    skip_special_tokens: bool = True
    priority: int = 0
    """Lower goes first, as in vLLM."""
    arrival: float = 0.0
    """Unix seconds when the gateway took the request; kept over attempts, so a retry does not lose its place."""
    cache_salt: str | None = None
    """Only requests with an equal salt share cached prefixes; requests with None share among themselves."""
    avoid: tuple[EngineId, ...] = ()
    """Engines that failed earlier attempts; used only where there is no other."""
    grammar: Grammar | None = None
    keep_markup: bool = False
    """Marks of tool calls and thoughts (`MARKUP_TOKENS`) stay in the text even where special tokens are skipped."""
    thinking: Thinking | None = None
    """Whether a chat's prompt ends inside or behind the model's reasoning; None if it ends with neither mark."""
    prefix_caching: bool = True
    """Whether its blocks may come from a cache (the engine's own, or a KV store) and go into one. If not, they have no
    hashes, so nobody can look for them or keep them."""
    suspect_until: Count | None = None
    """Set once a process died that had the request: each service handles it alone, an engine until it has so many
    output tokens. None: it is above suspicion."""
    key: str = ""
    """Name of the API key whose request it is; empty where it competes with no other key."""
    weight: float = 1.0
    """The share of its key, relative to those of others, of what engines can take; above 0."""
    pooling: PoolingOptions | None = None
    """Set where the prompt becomes a vector: nothing is generated then. None: tokens are generated."""
    lora: LoraId | None = None
    """The adapter that computes it, one of `ModelCard.loras`; None: `model` alone. Part of `block_hashes`."""
    prompt_embeds: PromptEmbeds | None = None
    """In place of the embeddings of the prompt's tokens; None: the prompt is `tokens`. Part of `block_hashes`."""
    trace: str | None = None
    """Context of its trace (W3C `traceparent`); None: it is not traced."""
    keep: bool = False
    """Whether the engine that ends it keeps the blocks of its prompt for a later request, and says so in a
    `PromptKept`."""
    kept: KeptPrompt | None = None
    """Where its prompt's blocks are kept. What is not there is computed: a promise to nobody, and a proof of nothing,
    as blocks are looked for by the hashes of this request's own tokens."""
    stream_interval: StreamInterval = 1


class TokenLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one output position, from the logits before any processing."""

    token: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...]
    """(token, log-probability), most likely first; or those of `SamplingOptions.logprob_token_ids`, in its order."""
    rank: int | None = None
    """How many tokens are at least as likely, itself included; set for prompt tokens only."""
