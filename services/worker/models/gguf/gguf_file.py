"""One GGUF file: what it says of its model, and its tensors as codes or as numbers.

The format is that of ggml (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); `transformers` reads it.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.gguf.gguf_codes import GgufCodes, has_codes, read_codes

_MAX_SIZE = 1 << 31
"""Elements of a dimension."""
_MORE_BLOCKS = {6: (32, 22), 7: (32, 24), 39: (32, 17)}
"""Q5_0, Q5_1 and MXFP4, which `gguf_codes` reads and transformers does not: elements and bytes of a block. llama.cpp
writes the first two where a row is no multiple of 256, in files called Q4_K_M, too."""


class GgufFile:
    """An open file. Reads tensors only when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError for a file that is broken, cut short, or of types that cannot be read."""
        try:
            # Only who converts a file pays for the import.
            from transformers.integrations.gguf.dequant import GGML_BLOCK
            from transformers.integrations.gguf.reader import GgufHeader, load_gguf_state_dict, read_gguf_metadata
        except ImportError:
            raise ModelError(f"{path}: the transformers that is installed reads no GGUF; 5.23 does") from None
        GGML_BLOCK.update(_MORE_BLOCKS)  # what transformers finds tensors by; it has no other way to be told
        self.path = path
        try:
            header = GgufHeader.from_file(str(path))
            self.metadata: dict[str, Any] = read_gguf_metadata(str(path))[0]
        except (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, struct.error) as error:
            raise ModelError(f"{path}: no GGUF file that can be read: {one_line(error)}") from None
        self.architecture: str = header.architecture
        self.types: dict[str, int] = header.ggml_types
        self.shapes: dict[str, tuple[int, ...]] = {each.name: each.shape for each in header.tensors}
        for name, shape in self.shapes.items():
            if not name.isprintable():
                raise ModelError(f"{path}: tensor {name!r}: a name of printable characters is expected")
            if not all(0 < size < _MAX_SIZE for size in shape):
                raise ModelError(
                    f"{path}: tensor {name} has shape {list(shape)}; sizes from 1 to {_MAX_SIZE - 1} can be read"
                )
        end = max((header.data_start + each.offset + each.nbytes for each in header.tensors), default=0)
        if end > path.stat().st_size:
            raise ModelError(f"{path}: cut short: its tensors end at byte {end}, the file at {path.stat().st_size}")
        self._tensors = load_gguf_state_dict(header)

    @property
    def quantized(self) -> bool:
        """Whether any tensor has blocks of codes."""
        return any(self._is_blocks(name) for name in self.types)

    @property
    def without_codes(self) -> set[str]:
        """Types of its blocks whose codes cannot stay what they are, by ggml's names."""
        from transformers.integrations.gguf.dequant import GGML_NAME

        return {GGML_NAME[kind] for name, kind in self.types.items() if self._is_blocks(name) and not has_codes(kind)}

    @property
    def tokenizer(self) -> tuple[str, dict[str, Any]]:
        """`tokenizer.json`, and what belongs into `tokenizer_config.json`. Raises ModelError for a kind that cannot be
        made of it."""
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

        try:
            architecture, parts, settings = get_gguf_tokenizer(str(self.path))
            made, _ = convert_gguf_tokenizer(architecture, parts)
        except Exception as error:  # tokenizers raises nothing more specific
            raise ModelError(f"{self.path}: no tokenizer can be made of it: {one_line(error)}") from None
        return made.to_str(), {key: value for key, value in settings.items() if value is not None}

    def numbers(self, name: str) -> Tensor:
        """The tensor in the type that it has; in float32 where it has codes."""
        if not self._is_blocks(name):
            return self._tensors[name][...]
        from transformers.integrations.gguf.dequant import dequantize

        flat: Tensor = dequantize(self._tensors[name][...].flatten(), self.types[name])
        return flat.view(self.shapes[name])

    def codes(self, name: str) -> GgufCodes | None:
        """The matrix as codes; None where those of its type cannot stay what they are."""
        shape = self.shapes[name]
        return read_codes(self.types[name], self._tensors[name][...], (shape[0], shape[1])) if len(shape) == 2 else None

    def size(self, name: str) -> int:
        """Elements of the tensor."""
        return prod(self.shapes[name])

    def _is_blocks(self, name: str) -> bool:
        return self._tensors[name].data.nbytes < 2 * self.size(name)


def one_line(error: Exception) -> str:
    """What it says, which may hold what a spoilt file says."""
    return " ".join(str(error).split())
