"""Reads tensors, or just the rows or columns that a rank needs, from a directory of safetensors files; and names a
model by a digest that tells its keys and values from any other model's.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.hf_layers.llava import language_model_name
from services.worker.models.tensor_file import StoredPart, StoredTensor, TensorFileError, TensorFiles, read_header
from services.worker.models.weight_files import INDEX, SINGLE, weight_files
from services.worker.platforms.interface import Platform
from services.worker.platforms.main_memory import gib
from shared.models.image_models import read_image_model

CPU = torch.device("cpu")
NOWHERE = torch.device("meta")
"""Of tensors without elements."""
NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types whose elements are weights; of others they are codes."""

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

_log = logging.getLogger(__name__)


class TensorSource(Protocol):
    """Where weights are read from."""

    def __contains__(self, name: str) -> bool: ...

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """See `Checkpoint.read`."""


class TensorPart(NamedTuple):
    """The arguments of `TensorSource.read`."""

    name: str
    shape: tuple[int, ...]
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None


@runtime_checkable
class StoredTensorSource(Protocol):
    """A `TensorSource` whose tensors have a type of their own, beside that of the run."""

    def read_stored(self, name: str) -> Tensor:
        """The whole tensor in the type that it is stored in. Raises ModelError where it is missing."""


def read_exactly(source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """Tensor `name` in float32, never rounded to the dtype of the run. Raises ModelError."""
    if not isinstance(source, StoredTensorSource):
        return source.read(name, shape).float()
    found = source.read_stored(name)
    if tuple(found.shape) != shape:
        raise ModelError(f"tensor {name} has shape {list(found.shape)}, the config asks for {list(shape)}")
    return found.float()


@runtime_checkable
class BatchedTensorSource(Protocol):
    """A `TensorSource` that reads many at once faster than one after the other."""

    def read_together(self, parts: Sequence[TensorPart]) -> Tensor:
        """The elements of all parts, one behind the other. Raises what `TensorSource.read` does."""


class Checkpoint:
    """The tensors of an open checkpoint. Reads only what is asked for, to where it is to lie."""

    def __init__(
        self, model_dir: Path, files: TensorFiles, tensors: dict[str, StoredTensor], dtype: torch.dtype
    ) -> None:
        self._model_dir = model_dir
        self._files = files
        self._tensors = tensors
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> list[str]:
        """Names of all tensors in the checkpoint."""
        return list(self._tensors)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that were read so far."""
        return self._files.bytes_read

    def renamed(self, prefix: str, to: str) -> Checkpoint:
        """The same with `prefix` replaced by `to` in the names that begin with it; what had such a name is hidden."""
        moved = {
            to + name.removeprefix(prefix): each for name, each in self._tensors.items() if name.startswith(prefix)
        }
        return type(self)(self._model_dir, self._files, self._tensors | moved, self._dtype)

    def headers(self) -> CheckpointHeaders:
        """The same tensors without their elements."""
        return CheckpointHeaders(self._model_dir, self._files, self._tensors, self._dtype)

    def is_matrix_of_codes(self, name: str) -> bool:
        """Whether the tensor `name` is called as matrices are, and its elements are no weights. Some models keep masks
        and positions beside them."""
        return name.endswith(("weight", "_proj")) and self._found(name).dtype not in NUMBERS

    def check_number(self, name: str) -> None:
        """Raises ModelError where the elements of the tensor `name` are no weights: codes that are taken for numbers
        are nonsense."""
        dtype, known = (str(each).replace("torch.", "") for each in (self._found(name).dtype, NUMBERS))
        if self._found(name).dtype not in NUMBERS:
            raise ModelError(
                f"{self._model_dir}: tensor {name} has dtype {dtype}; weights are one of {known}, or codes that a "
                "quantization_config explains"
            )

    def read_stored(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """The whole tensor `name`, or a range of its first dimension, in the type that it is stored in. Raises
        ModelError where it is missing or broken."""
        try:
            return self._files.read(self._found(name), rows)
        except (TensorFileError, OSError) as error:
            raise ModelError(f"tensor {name}: {error}") from None

    def read_codes(self, name: str, shape: tuple[int, ...], number: int) -> Tensor:
        """uint8: that of this number along the first dimension of tensor `name`, which is of this shape as a whole.
        Raises ModelError."""
        found = self._found(name)
        check_found(self._model_dir, name, found.shape, shape)
        if found.dtype != torch.uint8:
            raise ModelError(f"{self._model_dir}: tensor {name} has dtype {found.dtype}; codes are torch.uint8")
        return self.read_stored(name, (number, number + 1))[0]

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """Tensor `name` in the dtype of the run, or the given range of its first or second dimension.

        `shape` is that of the whole tensor. Raises ModelError where the tensor is missing or has another shape.
        """
        part = self._stored(TensorPart(name, shape, rows, columns))
        try:
            return self._files.read(*part).to(self._dtype)
        except (TensorFileError, OSError) as error:
            raise ModelError(f"tensor {name}: {error}") from None

    def read_together(self, parts: Sequence[TensorPart]) -> Tensor:
        """See `BatchedTensorSource`."""
        stored = [self._stored(part) for part in parts]
        if len({part.tensor.dtype for part in stored}) > 1:
            return torch.cat(
                [self.read(each.name, each.shape, rows=each.rows, columns=each.columns).view(-1) for each in parts]
            )
        try:
            return self._files.read_together(stored).to(self._dtype)
        except (TensorFileError, OSError) as error:
            raise ModelError(f"tensor {parts[0].name} and others: {error}") from None

    def _found(self, name: str) -> StoredTensor:
        found = self._tensors.get(name)
        if found is None:
            raise ModelError(f"{self._model_dir}: the checkpoint has no tensor {name}")
        return found

    def _stored(self, part: TensorPart) -> StoredPart:
        found = self._tensors.get(part.name)
        check_found(self._model_dir, part.name, None if found is None else found.shape, part.shape)
        assert found is not None, "it was found"
        self.check_number(part.name)
        return StoredPart(found, part.rows, part.columns)


class CheckpointHeaders(Checkpoint):
    """An open checkpoint whose tensors have shapes and no elements: what is missing or misshapen is found out before
    memory is taken. Reads nothing."""

    def read_stored(self, name: str, rows: tuple[int, int] | None = None) -> Tensor:
        """See `Checkpoint.read_stored`."""
        found = self._found(name)
        read = torch.empty(found.shape, dtype=found.dtype, device=NOWHERE)
        return read if rows is None else read[slice(*rows)]

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """See `Checkpoint.read`."""
        part = self._stored(TensorPart(name, shape, rows, columns))
        return torch.empty(part.shape, dtype=self._dtype, device=NOWHERE)

    def read_together(self, parts: Sequence[TensorPart]) -> Tensor:
        """See `BatchedTensorSource`."""
        elements = sum(math.prod(self._stored(part).shape) for part in parts)
        return torch.empty(elements, dtype=self._dtype, device=NOWHERE)


def check_matrices(checkpoint: Checkpoint) -> None:
    """Raises ModelError where a matrix of a checkpoint without a quantization_config is no weight: `transformers` would
    take its codes for numbers."""
    for name in checkpoint.names:
        if checkpoint.is_matrix_of_codes(name):
            checkpoint.check_number(name)


def check_found(model_dir: Path, name: str, found: Sequence[int] | None, wanted: tuple[int, ...]) -> None:
    """Raises ModelError where the tensor `name` of the checkpoint in `model_dir` is missing, or not of the shape
    `wanted`."""
    if found is None:
        raise ModelError(f"{model_dir}: the checkpoint has no tensor {name}")
    if tuple(found) != wanted:
        raise ModelError(f"{model_dir}: tensor {name} has shape {list(found)}, the config asks for {list(wanted)}")


@contextmanager
def open_checkpoint(
    model_dir: Path,
    dtype: torch.dtype,
    *,
    device: torch.device = CPU,
    single: str | None = None,
    base: str = "",
    language_model: bool = False,
    rename: Callable[[str], str] | None = None,
    rest: Callable[[], None] | None = None,
) -> Iterator[Checkpoint]:
    """The checkpoint in `model_dir`, single-file or sharded; or its file `single` alone. What is read is on `device`.
    `base`: what the names of a whole model begin with; where they lack it, as sentence-transformers writes them, they
    get it. `language_model`: it is that of a model of images, and has the names that it would have alone. `rename`:
    what a tensor is called here, by its name in the files. `rest`: see `TensorFiles`.

    Raises ModelError where there is none or it is broken.
    """
    paths = [model_dir / single] if single is not None else checkpoint_files(model_dir)
    with TensorFiles(device, rest) as files:
        tensors: dict[str, StoredTensor] = {}
        try:
            for path in paths:
                tensors |= files.open(path)
        except TensorFileError as error:
            raise ModelError(str(error)) from None
        if rename is not None:
            tensors = {rename(name): tensor for name, tensor in tensors.items()}
        if language_model:
            tensors = {language_model_name(name): tensor for name, tensor in tensors.items()}
        if base and f"{base}{EMBEDDING}" not in tensors and EMBEDDING in tensors:
            tensors = {name if name == HEAD else base + name: tensor for name, tensor in tensors.items()}
        begun = time.perf_counter()
        yield Checkpoint(model_dir, files, tensors, dtype)
        _log.info(
            "read %s of tensors at %.2f GB/s; with packing them it took %.1f s",
            gib(files.bytes_read),
            files.bytes_read / max(files.seconds_reading, 1e-9) / 1e9,
            time.perf_counter() - begun,
            extra={"model": str(model_dir)},
        )


def takes_images(model_dir: Path, load_format: str, platform: Platform, *, by_library: bool = False) -> bool:
    """Or sounds. Dummy weights have no tower; and on a device without main memory no attention sees what is behind a
    row. `by_library`: whether `transformers` computes the language model, as it does where it is the only one to."""
    images = read_image_model(model_dir)
    if images is None or images.by_library != by_library or load_format == "dummy":
        return False
    return platform.in_main_memory or not images.mutual


def checkpoint_files(model_dir: Path) -> list[Path]:
    """The directory's safetensors files, one or many. Raises ModelError where there is none."""
    try:
        found = weight_files(model_dir)
    except msgspec.MsgspecError as error:
        raise ModelError(f"{model_dir / INDEX}: {error}") from None
    if found:
        return found
    raise ModelError(
        f"{model_dir} has neither {SINGLE} nor {INDEX}: only safetensors checkpoints can be read; "
        "load_format dummy serves random weights"
    )


_BESIDE = re.compile(
    r"(?:^|\.)(?:visual\w*|vision_\w+|audio_tower|embed_tokens_extend|multi_modal_projector|mm_projector|aligner|mtp\w*"
    r"|talker|token2wav)\."
    r"|^(?:model\.)?(?:projector\.|encoder\.layers\.\d+\.(?:conv|ff[12]|attn\.(?:to_|rel_pos)))"  # Granite Speech's
)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def is_beside(name: str, num_layers: int) -> bool:
    """Whether a tensor is of a tower, or of a module that predicts further tokens, beside or behind the layers."""
    layer = _LAYER.search(name)
    return _BESIDE.search(name) is not None or (layer is not None and int(layer[1]) >= num_layers)


def stored_bytes(model_dir: Path, num_layers: int) -> int:
    """Bytes of the language model's tensors, with so many layers as the checkpoint counts them. Raises ModelError."""
    try:
        headers = [read_header(path).tensors for path in checkpoint_files(model_dir)]
    except (OSError, TensorFileError) as error:
        raise ModelError(str(error)) from None
    tensors = ((name, entry.data_offsets) for header in headers for name, entry in header.items())
    return sum(end - first for name, (first, end) in tensors if not is_beside(name, num_layers))


# The digest is made of the configuration and of samples of the files, without reading all weights.


_SAMPLE_BYTES = 1024
_DIGEST_BYTES = 16


def model_digest(model_dir: Path, config: Struct) -> str:
    """Hex BLAKE2b over the configuration, and over each tensor's name, type, shape, first and last KiB.

    The same however the checkpoint is cut into files, and for every rank. What was trained differs in (nearly) every
    element, so samples tell it. Raises ModelError for a broken checkpoint.
    """
    digest = blake2b(msgspec.json.encode(_without_stop_tokens(config)), digest_size=_DIGEST_BYTES)
    samples: dict[str, bytes] = {}
    for path in checkpoint_files(model_dir):
        samples |= _samples(path)
    for name in sorted(samples):
        digest.update(name.encode() + b"\0" + samples[name])
    return digest.hexdigest()


def dummy_digest(config: Struct) -> str:
    """The digest of dummy weights, which are a function of the configuration alone."""
    return blake2b(
        b"made up" + msgspec.json.encode(_without_stop_tokens(config)), digest_size=_DIGEST_BYTES
    ).hexdigest()


_ROUNDING = 2
"""To be raised when a setting rounds other weights, or to other values: cached blocks of before are not found."""


def quantized_digest(digest: str, quantization: str) -> str:
    """That of the same model with its weights rounded: its keys and values are others. "auto": `digest`."""
    if quantization == "auto":
        return digest
    return blake2b(f"{digest} {quantization} {_ROUNDING}".encode(), digest_size=_DIGEST_BYTES).hexdigest()


def _without_stop_tokens(config: Struct) -> Struct:
    """`config` without its stop tokens: keys and values do not depend on them."""
    return msgspec.structs.replace(config, eos_token_ids=())


def _samples(path: Path) -> dict[str, bytes]:
    """Each tensor's type, shape, first and last KiB, by name."""
    try:
        header = read_header(path)
        with path.open("rb") as file:
            found = {}
            for name, entry in header.tensors.items():
                start, end = (header.start + offset for offset in entry.data_offsets)
                size = min(_SAMPLE_BYTES, end - start)
                file.seek(start)
                first = file.read(size)
                file.seek(end - size)
                found[name] = f"{entry.dtype}{list(entry.shape)}".encode() + first + file.read(size)
            return found
    except (OSError, TensorFileError) as error:
        raise ModelError(str(error)) from None
