"""How often each expert of each layer was picked: counted beside steps, kept in files, read when experts are placed.

Each engine has a file for each of its pipeline stages, written by the stage's first rank: all ranks of a stage have the
same rows and the same router. What an engine has counted in its lives before weighs half in the next one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from services.worker.models.config import ModelError
from services.worker.models.expert_parallel.expert_balance import ExpertMoves
from services.worker.models.expert_parallel.placement import ExpertPlacement
from services.worker.models.expert_parallel.rearrangement import ExpertRearranger
from shared.private_files import replace_private

_SUFFIX = ".experts.json"
_DIGITS = 16
"""Of a model's digest, in the name of a file."""


class ExpertLoadFile(Struct, frozen=True):
    """What a file holds."""

    model: str
    """The digest of the model."""
    engine: str
    experts: int
    """Of each layer."""
    layers: dict[int, list[int]]
    """Picks of each expert, by the layer's number."""


class _LastBalance(NamedTuple):
    """What had been picked when a layer's experts were moved last."""

    counts: list[int]
    by_rank: list[float]


class ExpertLoad:
    """Owns the counts of one rank's layers. Steps add to them on the thread that computes; whoever reads them meanwhile
    may see a part of a step."""

    def __init__(
        self,
        counts: Mapping[int, Tensor],
        placements: Sequence[ExpertPlacement],
        path: Path | None = None,
        *,
        model: str = "",
        engine: str = "",
        logs_balance: bool = False,
    ) -> None:
        """`counts`: int64 [E] by the layer's number. `placements`: of all layers of the model; none: ranks have shares
        of all experts. `path`: the file that `save` writes; None: nothing is written. Raises ModelError where that is
        no such file."""
        self._counts = counts
        self._placements = list(placements)
        self._settled: dict[int, _LastBalance] = {}
        self._lock = threading.Lock()
        self._rearranger: ExpertRearranger | None = None
        self._path = path
        self.model, self._engine = model, engine
        self.logs_balance = logs_balance
        self._before: Mapping[int, Sequence[int]] = {}
        if path is not None and path.exists():
            self._before = _read(path, model).layers

    def restart(self) -> None:
        """Forgets what was counted; what the file held stays. Called before the first step that counts."""
        self._settled.clear()
        with torch.inference_mode():
            for counts in self._counts.values():
                counts.zero_()

    @property
    def layers(self) -> dict[int, list[int]]:
        """Picks of each expert since `restart`, by the layer's number. Waits for the device."""
        return {layer: counts.tolist() for layer, counts in self._counts.items()}

    def by_rank(self) -> dict[int, list[float]]:
        """Picks that each rank of the stage has computed since `restart`, by the layer's number; none where ranks have
        shares of all experts. Of an expert with several replicas each counts as an equal part."""
        if not self._placements:
            return {}
        with self._lock:
            return {layer: self._by_rank(layer, counts.tolist()) for layer, counts in self._counts.items()}

    def follow(self, rearranger: ExpertRearranger) -> None:
        """Experts are moved by it from now on."""
        self._rearranger = rearranger
        rearranger.on_change = self._change

    @property
    def moves(self) -> ExpertMoves | None:
        """How experts were moved; None where they are not."""
        return None if self._rearranger is None else self._rearranger.moves

    def _change(self, layer: int, placement: ExpertPlacement) -> None:
        """What was picked so far was computed where experts are until now."""
        with self._lock:
            counts = self._counts[layer].tolist()
            self._settled[layer] = _LastBalance(counts, self._by_rank(layer, counts))
            self._placements[layer] = placement

    def _by_rank(self, layer: int, counts: list[int]) -> list[float]:
        settled, placement = self._settled.get(layer), self._placements[layer]
        if settled is None:
            return placement.loads(counts)
        since = placement.loads([now - then for now, then in zip(counts, settled.counts, strict=True)])
        return [before + more for before, more in zip(settled.by_rank, since, strict=True)]

    def save(self) -> None:
        """Writes the file as a whole, if there is one and something was counted. Raises OSError."""
        counted = self.layers
        if self._path is None or not any(map(any, counted.values())):
            return
        layers = {layer: self._with_before(layer, counts) for layer, counts in counted.items()}
        experts = len(next(iter(layers.values())))
        data = msgspec.json.encode(ExpertLoadFile(self.model, self._engine, experts, layers))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_private(self._path, data)

    def _with_before(self, layer: int, counts: list[int]) -> list[int]:
        before = self._before.get(layer, [0] * len(counts))
        return [count + former // 2 for count, former in zip(counts, before, strict=True)]


def load_path(folder: Path, model: str, engine: str, first_layer: int) -> Path:
    """The file of an engine's stage."""
    return folder / f"{model[:_DIGITS]}.{re.sub(r'[^A-Za-z0-9_-]', '_', engine)}.{first_layer}{_SUFFIX}"


def read_loads(folder: Path | None, model: str, experts: int, layers: int) -> list[list[int]]:
    """Picks of each expert of each layer, the sum of all engines' files; zeros where nothing was counted. Raises
    ModelError for a file that cannot be read, or of other numbers of experts."""
    total = [[0] * experts for _ in range(layers)]
    for path in () if folder is None else sorted(folder.glob(f"{model[:_DIGITS]}.*{_SUFFIX}")):
        for layer, counts in _read(path, model, experts, layers).layers.items():
            total[layer] = [one + other for one, other in zip(total[layer], counts, strict=True)]
    return total


def _read(path: Path, model: str, experts: int | None = None, layers: int | None = None) -> ExpertLoadFile:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=ExpertLoadFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"expert_load_dir: {path}: {error}") from None
    if found.model != model:
        raise ModelError(f"expert_load_dir: {path} is of the model {found.model}, not of {model}")
    if experts is not None and found.experts != experts:
        raise ModelError(f"expert_load_dir: {path}: {found.experts} experts; the model has {experts}")
    if any(len(counts) != found.experts or min(counts, default=0) < 0 for counts in found.layers.values()):
        raise ModelError(f"expert_load_dir: {path}: a layer has not one count of each of {found.experts} experts")
    if layers is not None and any(not 0 <= layer < layers for layer in found.layers):
        raise ModelError(f"expert_load_dir: {path}: a layer that the model does not have; it has {layers}")
    return found


def empty_counts(experts: int, device: torch.device) -> Tensor:
    """Of one layer."""
    return torch.zeros(experts, dtype=torch.int64, device=device)
