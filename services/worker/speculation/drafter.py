"""What a method of drafting has to bring: weights read once, and a proposer for every runner that is made of them.

Also the checkpoints of Medusa heads and EAGLE layers as they are published: safetensors, or PyTorch's own files, which
are read with `weights_only` and so run no code. They are small, so all tensors are read at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

import msgspec
import torch
from torch import Tensor

from services.worker.models.checkpoint import Checkpoint, TensorSource, check_found, open_checkpoint
from services.worker.models.config import ModelConfig, ModelDescription, ModelError
from services.worker.models.decoder import Decoder
from services.worker.models.dummy_weights import DummyTensors
from services.worker.models.loaded_model import CausalLm
from services.worker.models.loading import load_embedding, load_embedding_and_head
from services.worker.models.published.names import library_names
from services.worker.models.quantization.quantized_checkpoint import as_configured
from services.worker.models.weights import ForwardPass, KvCaches
from services.worker.ops.interface import BatchMeta, EmbeddingTable, Ops, PackedLinear
from services.worker.ops.native.native_ops import NativeOps
from services.worker.speculation.proposer import Proposer
from shared.models.image_models import nests_language_model


class Drafter(Protocol):
    """Owns a method's weights."""

    @property
    def kv_block_bytes(self) -> int:
        """Memory that it takes for each of the engine's KV blocks."""

    def proposer(self, num_blocks: int, max_sequences: int) -> Proposer:
        """A proposer with memory of its own, for a runner of so many blocks and sequences."""


class DraftHead(Protocol):
    """A layer that drafts, with what stands before and behind it."""

    hidden_size: int
    """Elements of the rows that it goes on from."""

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of a block of its keys and values."""

    def allocate_kv(self, num_blocks: int) -> KvCaches:
        """The cache of its one layer."""

    def combine(self, features: Tensor) -> Tensor:
        """features [n, …], what the model keeps of each row → [n, hidden] that the layer begins with."""

    def predict(
        self, ids: Tensor, given: Tensor, meta: BatchMeta, caches: KvCaches, *, wants_logits: bool
    ) -> tuple[Tensor, Tensor | None]:
        """ids [n] int32, each behind one of the rows `given` [n, hidden] → (the rows that go on from them [n, hidden],
        the logits [R, vocab] of `meta.logits_rows` where wanted, until the next call)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden], as `predict` gives → [R, vocab] of the model's vocabulary; -inf where it drafts none."""

    def draft_chain(
        self, first: Tensor, meta: BatchMeta, steps: int, stride: int, caches: KvCaches, given: Tensor
    ) -> Tensor | None:
        """See `NativeDecoder.draft_chain`; None: no chain is made in one call here."""


@runtime_checkable
class HasDecoder(Protocol):
    """A drafter that is a model itself."""

    @property
    def decoder(self) -> Decoder:
        """The model that drafts."""

    @property
    def decodes(self) -> int:
        """Rows that one sequence has in a step of its decodes, at the most."""


@runtime_checkable
class SupportsDecodeReplay(Protocol):
    """A proposer that runs a decoder."""

    def replay_by(self, replaying: Callable[[ForwardPass, KvCaches], ForwardPass]) -> None:
        """Computes from here on by what `replaying` makes of its decoder's forward pass on its caches."""


@dataclass(frozen=True, slots=True)
class TargetModel:
    """The model that is drafted for."""

    folder: Path
    config: ModelDescription
    decoder: CausalLm
    ops: Ops
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    ranks: int
    dummy: bool = False
    """Whether its weights are dummy ones."""

    @property
    def native_config(self) -> ModelConfig:
        """The configuration of a model that we compute; others are not drafted for by what they are made of."""
        assert isinstance(self.config, ModelConfig), "see choice.open_drafter"
        return self.config

    def check_sizes(self, folder: Path, **sizes: int) -> None:
        """Raises ModelError where a size of the drafter in `folder` is not the model's."""
        for name, size in sizes.items():
            own = getattr(self.config, name)
            if size != own:
                raise ModelError(f"{folder}: {name} is {size}, the model's is {own}")

    def for_drafts(self) -> TargetModel:
        """The target model with the operations that drafters use: in bfloat16 where that is faster."""
        if not isinstance(self.ops, NativeOps) or (faster := self.ops.for_drafts()) is self.ops:
            return self
        return replace(self, ops=faster, dtype=torch.bfloat16)

    def embedding(self) -> EmbeddingTable:
        """The whole embedding; ranks of several hold shares, so it is read anew."""
        assert isinstance(self.decoder, Decoder), "see native_config"
        if self.ranks == 1 and (own := self.decoder.weights.embedding) is not None:
            return own if self.ops is self.decoder.ops else self._numbers(own)
        with self._tensors() as tensors:
            return load_embedding(tensors, self.native_config, self.ops, self.device)

    def dummy_tensors(self) -> DummyTensors:
        """In place of a checkpoint of the model's kind."""
        return DummyTensors(self.dtype, self.device, norm_offset=self.native_config.norm_offset)

    @contextmanager
    def _tensors(self) -> Iterator[TensorSource]:
        if self.dummy:
            yield self.dummy_tensors()
            return
        with self.open_checkpoint() as checkpoint:
            yield as_configured(checkpoint, self.folder, self.dtype)

    def open_checkpoint(self) -> AbstractContextManager[Checkpoint]:
        """The model's, whose tensors have the names that its language model alone would give them. Raises ModelError
        on entering."""
        sees = nests_language_model(self.folder)
        return open_checkpoint(
            *(self.folder, self.dtype),
            device=self.device,
            base="model.",
            language_model=sees,
            rename=library_names(self.native_config),
        )

    def _numbers(self, table: EmbeddingTable) -> Tensor:
        if not isinstance(table, Tensor):
            words = torch.arange(self.native_config.vocab_size, dtype=torch.int32)
            table = self.decoder.ops.embed(words, table)
        return table.to(self.dtype)

    def embedding_and_head(self) -> tuple[EmbeddingTable, PackedLinear]:
        """The whole embedding, and the whole head; ranks of several hold shares, so they are read anew."""
        assert isinstance(self.decoder, Decoder), "see native_config"
        weights, tied = self.decoder.weights, self.native_config.tied_embeddings
        if self.ranks == 1 and weights.embedding is not None and weights.head is not None:
            if self.ops is self.decoder.ops:
                return weights.embedding, weights.head
            if tied:
                embedding = self._numbers(weights.embedding)
                return embedding, self.ops.pack_linear(embedding, None)
        with self._tensors() as tensors:
            return load_embedding_and_head(tensors, self.native_config, self.ops, self.device)


_SAFETENSORS = ("model.safetensors", "medusa_lm_head.safetensors")
_PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt")
_INDEX = "model.safetensors.index.json"

_T = TypeVar("_T")


class DrafterCheckpoint:
    """The tensors of a drafter, by name; as `models.checkpoint.Checkpoint`."""

    def __init__(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self._folder = folder
        self._tensors = tensors

    @property
    def folder(self) -> Path:
        """The directory that it was read from."""
        return self._folder

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def renamed(self, prefix: str, to: str) -> DrafterCheckpoint:
        """The tensors with `prefix` replaced by `to` in the names that begin with it."""
        changed = {
            to + name.removeprefix(prefix) if name.startswith(prefix) else name: tensor
            for name, tensor in self._tensors.items()
        }
        return DrafterCheckpoint(self._folder, changed)

    def with_default(self, name: str, tensor: Tensor) -> DrafterCheckpoint:
        """The tensors, with `tensor` under `name` if that is missing."""
        return DrafterCheckpoint(self._folder, {name: tensor} | self._tensors)

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """See `models.checkpoint.Checkpoint.read`."""
        whole = self._tensors.get(name)
        check_found(self._folder, name, None if whole is None else whole.shape, shape)
        assert whole is not None, "it was found"
        part = whole if rows is None else whole[slice(*rows)]
        return (part if columns is None else part[:, slice(*columns)]).contiguous()


def read_drafter(folder: Path, dtype: torch.dtype) -> DrafterCheckpoint:
    """All tensors in `folder`, in `dtype`. Raises ModelError."""
    for name in _SAFETENSORS:
        if (folder / name).exists():
            return DrafterCheckpoint(folder, _safetensors(folder, name, dtype))
    if (folder / _INDEX).exists():
        return DrafterCheckpoint(folder, _safetensors(folder, None, dtype))
    for name in _PICKLED:
        if (folder / name).exists():
            return DrafterCheckpoint(folder, _pickled(folder / name, dtype))
    raise ModelError(f"{folder} has no weights: {', '.join((*_SAFETENSORS, _INDEX, *_PICKLED))} is expected")


def read_settings(folder: Path, kind: type[_T]) -> _T:
    """`config.json`, strictly as far as `kind` goes. Raises ModelError."""
    path = folder / "config.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: {error}") from None


def _safetensors(folder: Path, name: str | None, dtype: torch.dtype) -> dict[str, Tensor]:
    with open_checkpoint(folder, dtype, single=name) as checkpoint:
        return {key: _as(checkpoint.read_stored(key), dtype) for key in checkpoint.names}


def _pickled(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a broken file makes the unpickler raise
        raise ModelError(f"{path} cannot be read: {error}") from None
    return {name: _as(tensor, dtype) for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights in the dtype of the run; numbers of tokens stay what they are."""
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
