"""What an engine publishes about the model that it serves, and about what requests may ask of it."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from shared.blocks import DEFAULT_BLOCK_SIZE
from shared.ids import LoraId, ModelName, TokenId
from shared.messages.generation import PoolingType

LogitActivation = Literal["sigmoid", "softmax", "none"]
"""What makes probabilities of a classifier's logits, or leaves them as they are."""


PooledKind = Literal["embeddings", "labels", "steps"]
"""What vectors are: embeddings, a classifier's logits, or its logits of each token, or step of a solution."""


class PoolingCard(Struct, frozen=True, array_like=True, kw_only=True):
    """How an engine makes vectors of prompts: embeddings, or logits of a classifier's labels."""

    pooling: PoolingType
    normalize: bool
    """Whether vectors are normalized where a request does not say."""
    size: int
    """Elements of a whole vector."""
    matryoshka: tuple[int, ...] = ()
    """Numbers of elements that a request may ask for; empty: any up to `size`."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's labels, for each of which a vector has a logit; empty: vectors are embeddings."""
    activation: LogitActivation = "none"
    """What makes probabilities of a classifier's logits."""
    whole: bool = False
    """Whether each prompt is computed in one step, as encoders do; see `PoolingOptions.whole`."""
    step_tag_id: TokenId | None = None
    """The token that steps of a solution end with where a request does not say, if `pooling` is "all"; None: every
    token has a vector."""
    token_ids: tuple[TokenId, ...] = ()
    """The tokens of a language model whose logits those of the labels are; none: labels have a head of their own."""
    activated: bool = True
    """Whether a classifier's logits go through `activation` where a request does not say."""
    prompts: tuple[tuple[str, str], ...] = ()
    """What the checkpoint says is put before a text that becomes an embedding, by the name of its kind: query, …"""

    @property
    def makes(self) -> PooledKind:
        """What its vectors are."""
        if self.pooling == "all":
            return "steps"
        return "labels" if self.labels else "embeddings"


FrameSampling = Literal["steps", "ends", "seconds", "paces", "shares", "middles", "pace", "inner"]
"""Which frames of a video are looked at. steps: an even number of them, equally far from each other, from the first on.
ends: those from the first to the last one. seconds: so many of each second. paces: fewer of each second of a longer one
(GLM-4.6V). shares: all of a short one, of a longer one as many, equally far from each other. middles: the same, each in
the middle of its share (InternVL). pace: as paces, but as many of each second however long it is (GLM-5-Next). inner:
those from the first to the last one, of a long video without its first and last second (SmolVLM)."""


class LoraCard(Struct, frozen=True, array_like=True, kw_only=True):
    """A LoRA adapter that an engine serves beside its model."""

    name: ModelName
    """What clients call it, in place of the model's name."""
    id: LoraId
    rank: int


class LoraRefusal(Struct, frozen=True, array_like=True):
    """Why an adapter of the registry's file is not served."""

    name: ModelName
    path: str
    reason: str
    missing: bool = False
    """Whether there is no adapter at this path."""


class AudioModel(Struct, frozen=True, array_like=True, kw_only=True):
    """What a model's files say of the sounds that it hears, a window of them at a time, and of its special tokens."""

    row_size: int
    """Elements of each row that its encoder makes."""
    rows: int
    """Those of a window, however much of it is silence."""
    sample_rate: int
    """Samples of a second."""
    window_s: int
    """Seconds."""
    begin: int
    """The token that every answer begins behind."""
    end: int
    """The token that ends an answer; those before it are text."""
    no_timestamps: int
    """The token behind which an answer has no times; those behind it are the times, from 0 on."""
    languages: tuple[tuple[str, int], ...]
    """Each language's code (`de`) and token; none where the model knows English alone."""
    tasks: tuple[tuple[str, int], ...]
    """Those of "transcribe" and "translate"; none where it does not translate."""
    previous: int | None = None
    """The token behind which stands what was said before; None: the model reads none of that."""
    suppressed: tuple[int, ...] = ()
    """Tokens that are never drawn."""
    suppressed_first: tuple[int, ...] = ()
    """Those that are not drawn at first."""
    max_first_timestamp: int | None = None
    """The latest time at which an answer may begin, as a number of the model's steps; None: any."""

    @property
    def timestamp_s(self) -> float:
        """Seconds between two times that it knows."""
        return self.window_s / self.rows

    @property
    def no_speech(self) -> int:
        """The token that says that nobody speaks."""
        return self.no_timestamps - 1


class EncoderDecoderModel(Struct, frozen=True, array_like=True, kw_only=True):
    """What a model's files say of the prompts that its encoder reads (BART, T5), and of what its answers begin with."""

    row_size: int
    """Elements of each row that its encoder makes of a token."""
    rows: int
    """Tokens of the longest prompt."""
    start: int
    """The token that every answer begins behind (`decoder_start_token_id`)."""
    forced_first: int | None = None
    """The token that every answer begins with (`forced_bos_token_id`): a language, or that of the beginning."""

    @property
    def decoder_prompt(self) -> tuple[int, ...]:
        """What an answer is drawn behind, where a request does not say."""
        return (self.start,) if self.forced_first is None else (self.start, self.forced_first)


class CrossImageModel(Struct, frozen=True, array_like=True, kw_only=True):
    """What a model's files say of images that its tokens attend to beside themselves (Llama 3.2 Vision)."""

    token: int
    """What stands in a prompt where an image does. It may be above all tokens that are drawn."""
    row_size: int
    """Elements of each row that its encoder makes."""
    rows: int
    """Of all images of a prompt, at most."""


class TranscriptionChat(Struct, frozen=True, array_like=True, kw_only=True):
    """The chat by which a model that takes sounds in chats is asked to write down what is said in one."""

    window_s: int
    """Seconds of a sound that are written down at a time."""
    before: str = ""
    """What the user says before the sound."""
    behind: str = ""
    """The same behind it."""
    prompt: Literal["system", "user"] | None = None
    """Where what a client says of the sound stands: in a message before, or in place of what the user says. None:
    nowhere."""
    answer: str | None = None
    """How the answer begins, with the `language` that is spoken; None: it is not begun."""
    unsaid: str = ""
    """The same where no language is named."""
    mark: str = ""
    """What stands before the text where the model says the language itself, as the end of that."""
    languages: tuple[tuple[str, str], ...] = ()
    """Each language's code (`de`), and what the model calls it; none where it is not told."""
    shown: str | None = None
    """What stands for the sound, in one text with what is around it; None: it is a part of the message."""

    @property
    def around(self) -> tuple[str, str]:
        """What the user says before the sound, and behind it."""
        return self.before, self.behind


class SoundModel(Struct, frozen=True, array_like=True):
    """What a model's files say of the sounds that its chats may have."""

    row_size: int
    """Elements of each row that its encoder makes."""
    sample_rate: int
    """Samples of a second."""
    window_s: int
    """Seconds that a sound may have."""
    transcription: TranscriptionChat | None = None
    """None: it writes nothing down unless a chat asks it to."""


class VideoModel(Struct, frozen=True, array_like=True, kw_only=True):
    """What a model's files say of the videos that it is shown."""

    fps: float = 2.0
    """Frames that are looked at of a second."""
    min_frames: int = 4
    """Of a video, where it has so many."""
    max_frames: int = 64
    sampling: FrameSampling = "steps"
    positions_per_second: float | None = None
    """How far a second is on the axis of frames (m-RoPE); None: two frames are one position, however long they last."""
    timed: bool = False
    """Whether the time of frames, or which they are, is written beside them, as text; they are images of their own
    then."""
    together: Annotated[int, Meta(ge=1, le=2)] = 2
    """Frames that become rows together; those of a video that has too few for the last of them have that twice."""
    stamp: Literal["middle", "first"] = "middle"
    """Which time is theirs: between them, or of the first."""
    closed: bool = False
    """Whether a row stands behind all others of a video, where it ends."""

    def groups(self, frames: int) -> int:
        """How often `frames` become rows."""
        return -(-frames // self.together)


class CardVideos(NamedTuple):
    """How a model is shown videos, as two fields of a card: release 0.3.0 reads no card with a word that it has not,
    and so takes no notice of the engine. What it cannot read stands where it does not look."""

    videos: VideoModel | None
    newer_videos: VideoModel | None

    @classmethod
    def of(cls, videos: VideoModel | None) -> CardVideos:
        """One of the two is None."""
        old = videos is not None and videos.sampling in ("steps", "ends", "seconds", "paces", "shares")
        return cls(videos, None) if old else cls(None, videos)


class SamplingDefaults(Struct, frozen=True, array_like=True, kw_only=True):
    """What requests are sampled with that do not say; None: OpenAI's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    """The most that any request may generate, whatever it says."""


class ModelCard(Struct, frozen=True, array_like=True, kw_only=True):
    """What an engine publishes about the model that it serves."""

    name: ModelName
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    created: int
    """When the worker loaded the model, in Unix seconds."""
    block_size: int = DEFAULT_BLOCK_SIZE
    """Tokens of a block of its KV cache."""
    pooling: PoolingCard | None = None
    """None: it makes no vectors of prompts."""
    generates: bool = True
    """Whether it generates text; not where its checkpoint has no language model head."""
    loras: tuple[LoraCard, ...] = ()
    """The adapters that it may be computed with."""

    def lora(self, name: ModelName) -> LoraCard | None:
        """The adapter that clients call `name`; None where there is none."""
        return next((each for each in self.loras if each.name == name), None)

    extra_args: tuple[str, ...] = ()
    """What requests may have in `vllm_xargs`: the arguments of the engine's logits processors."""
    prompt_embeds: int | None = None
    """Elements of each row of a prompt that is given as embeddings; None: it takes none."""
    aliases: tuple[ModelName, ...] = ()
    """Further names by which clients may call it."""
    images: int | None = None
    """Elements of each row that an encoder makes of an image; None: prompts may have none."""
    audio: AudioModel | None = None
    """What it writes down is said in a sound, of which each request has rows beside its prompt; None: it hears none."""
    videos: VideoModel | None = None
    """What release 0.3.0 can read of `shown_videos`; see `CardVideos`."""
    sampling: SamplingDefaults | None = None
    """None: OpenAI's."""
    sounds: SoundModel | None = None
    """What sounds its chats may have, in place of tokens; None: none."""
    encoder_decoder: EncoderDecoderModel | None = None
    """How its encoder reads prompts, of which each request has rows beside what its decoder begins with; None: it has
    no encoder of texts."""

    cross_images: CrossImageModel | None = None
    """How it attends to images beside its prompts, which may have none; None: it does not."""
    newer_videos: VideoModel | None = None
    """The same where 0.3.0 cannot."""

    @property
    def shown_videos(self) -> VideoModel | None:
        """How it is shown videos; None: it takes none."""
        return self.videos or self.newer_videos

    @property
    def reads_beside(self) -> AudioModel | EncoderDecoderModel | CrossImageModel | None:
        """What its tokens attend to beside themselves: rows of an encoder's, as many and as large as this says."""
        return self.audio or self.encoder_decoder or self.cross_images

    def takes_rows(self, size: int) -> bool:
        """Whether rows of `size` elements may stand in place of tokens, or beside them: a client's or an encoder's."""
        hearing = (None if each is None else each.row_size for each in (self.reads_beside, self.sounds))
        return size in (self.prompt_embeds, self.images, *hearing)
