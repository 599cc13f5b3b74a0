"""The kernels as Python objects: the loaded library with its threads, a packed weight, a batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from services.worker.native import library
from services.worker.native.build import BuildError, Level, library_path
from services.worker.ops import Activation, BatchMeta, OpsUnavailable

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
"""`Activation` of linear.h."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in the kernels' layout, and what keeps its memory alive."""

    linear: library.Linear
    groups: Tensor
    bias: Tensor | None
    out: int
    inputs: int


class Kernels:
    """The loaded library and a pool of threads that lives as long as this object.

    Raises OpsUnavailable where there is no library to load.
    """

    def __init__(self, threads: int, level: Level) -> None:
        try:
            self.library = library.load(library_path(level))
        except (BuildError, OSError, AttributeError) as error:
            raise OpsUnavailable(str(error)) from None
        self.pool: int = self.library.baton_pool(threads)
        self.threads = threads

    @property
    def instructions(self) -> str:
        """What the library was compiled for."""
        name: bytes = self.library.baton_instructions()
        return name.decode()

    def __del__(self) -> None:
        if getattr(self, "pool", None):
            self.library.baton_pool_free(self.pool)


def batch_of(meta: BatchMeta) -> library.Batch:
    """`meta` for the library, which reads its tensors where they are."""
    return library.Batch(
        len(meta.positions),
        len(meta.context_lens),
        meta.query_starts.data_ptr(),
        meta.context_lens.data_ptr(),
        meta.block_tables.data_ptr(),
        meta.block_tables.shape[1],
        meta.slots.data_ptr(),
        meta.positions.data_ptr(),
    )


def address_of(tensor: Tensor | None) -> int | None:
    """Where the library finds it; null for None."""
    return None if tensor is None else tensor.data_ptr()
