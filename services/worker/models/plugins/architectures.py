"""Finds the architecture of a model that a package brings, and keeps what the package does wrong by its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from torch import Tensor

from services.worker.models.checkpoint import Checkpoint, TensorPart
from services.worker.models.config import ModelConfig, ModelError, plain_json
from services.worker.models.decoder import Decoder
from services.worker.models.hf_config import architectures_of, is_native, read_model_config
from services.worker.models.plugins.interface import DecoderParts, ModelArchitecture
from shared.plugins.entry_points import PluginError, load_class, plugin_names

GROUP = "baton.models"

_T = TypeVar("_T")


class PluginModel(NamedTuple):
    """A model whose architecture a package brings."""

    architecture: ModelArchitecture
    config: ModelConfig
    where: str
    """The entry point and its distribution, for errors."""

    def decoder(self, parts: DecoderParts) -> Decoder:
        """See `ModelArchitecture.decoder`. Raises ModelError."""
        made = _asked(self.where, lambda: self.architecture.decoder(parts))
        if not isinstance(made, Decoder):
            raise ModelError(f"{self.where}: decoder: a Decoder is expected, not {made!r:.80}")
        return made

    def tensors(self, checkpoint: Checkpoint) -> RenamedTensors:
        """The checkpoint's tensors by the names of the native architecture."""
        return RenamedTensors(checkpoint, lambda name: _asked(self.where, lambda: self.architecture.tensor_name(name)))


class RenamedTensors:
    """A checkpoint that is read by other names, see `checkpoint.TensorSource`."""

    def __init__(self, checkpoint: Checkpoint, rename: Callable[[str], str]) -> None:
        self._checkpoint = checkpoint
        self._rename = rename

    def __contains__(self, name: str) -> bool:
        return self._rename(name) in self._checkpoint

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        rows: tuple[int, int] | None = None,
        columns: tuple[int, int] | None = None,
    ) -> Tensor:
        """See `Checkpoint.read`."""
        return self._checkpoint.read(self._rename(name), shape, rows=rows, columns=columns)

    def read_stored(self, name: str) -> Tensor:
        """See `StoredTensorSource.read_stored`."""
        return self._checkpoint.read_stored(self._rename(name))

    def read_together(self, parts: Sequence[TensorPart]) -> Tensor:
        """See `BatchedTensorSource.read_together`."""
        return self._checkpoint.read_together([part._replace(name=self._rename(part.name)) for part in parts])


def find_plugin_model(folder: Path) -> PluginModel | None:
    """The model in `folder`, where its architecture is none of ours and an installed package brings it, else None.
    Raises ModelError where the package cannot be used, or refuses the model."""
    if is_native(folder):
        return None
    brought = set(plugin_names(GROUP))
    name = next((each for each in architectures_of(folder) if each in brought), None)
    if name is None:
        return None
    try:
        kind, where = load_class(GROUP, name, ModelArchitecture)
    except PluginError as error:
        raise ModelError(f"architectures {name}: {error}") from None
    path = folder / "config.json"
    raw = msgspec.json.decode(plain_json(path.read_bytes()), type=dict[str, Any])
    architecture = _asked(where, lambda: kind(raw))
    described = _asked(where, lambda: dict(architecture.base_config()))
    base = read_model_config(
        folder, quantized=True, described=msgspec.json.encode({**described, "architectures": [architecture.base]})
    )
    if base.states is not None:
        raise ModelError(
            f"{where}: base {architecture.base}: it has {base.states.kind}, which no package's model can have"
        )
    if base.connections is not None:
        raise ModelError(f"{where}: base {architecture.base}: no package's model can have several streams")
    config = _asked(where, lambda: architecture.config(base))
    if not isinstance(config, ModelConfig):
        raise ModelError(f"{where}: config: a ModelConfig is expected, not {config!r:.80}")
    return PluginModel(architecture, replace(config, architecture=name, plugin=where), where)


def _asked(where: str, ask: Callable[[], _T]) -> _T:
    """What the package answers. Raises ModelError with what it raised."""
    try:
        return ask()
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from None
    except ModelError:
        raise
    except Exception as error:  # whatever a foreign package raises
        raise ModelError(f"{where}: {error!r}") from None
