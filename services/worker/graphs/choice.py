"""Whether a rank captures its decodes, and how: composes what this folder has."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple, Protocol, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from services.worker.distributed.communicator import Communicator, Pipeline
from services.worker.graphs.capture import Capture, CudaCapture
from services.worker.graphs.decode_inputs import DecodeInputs, capture_sizes
from services.worker.graphs.replayed_decodes import ReplayedDecodes, Replaying
from services.worker.models.loaded_model import CausalLm
from services.worker.models.weights import ForwardPass, KvCaches
from services.worker.platforms.interface import Platform
from services.worker.platforms.main_memory import gib
from services.worker.speculation.drafter import Drafter, HasDecoder
from services.worker.speculation.proposer import DraftSettings
from shared.blocks import blocks_for
from shared.messages.model_card import ModelCard

_log = logging.getLogger(__name__)


@runtime_checkable
class Capturable(Protocol):
    """What can be part of a graph says so: operations, or collectives.

    They never wait for the host, launch the same for the same shapes, and know padding (see `decode_inputs`).
    """

    @property
    def capturable(self) -> bool:
        """Whether what it launches may be part of a graph."""


class RankParts(Protocol):
    """What is known of a rank before its KV memory is allocated."""

    @property
    def card(self) -> ModelCard:
        """With the longest sequences that are asked for."""

    @property
    def platform(self) -> Platform:
        """The device that the rank computes on."""

    @property
    def decoder(self) -> CausalLm:
        """The model's decoder."""

    @property
    def max_num_seqs(self) -> int:
        """Sequences that a step may hold."""

    @property
    def drafter(self) -> Drafter | None:
        """What drafts on this rank."""

    @property
    def drafting(self) -> DraftSettings:
        """What every rank knows of what drafts."""


class DecodeGraphs(Struct, frozen=True):
    """What one rank's decodes are captured with."""

    decoder: CausalLm
    platform: Platform
    sizes: tuple[int, ...]
    max_model_len: int
    features: bool
    """Whether steps are asked for the last hidden states."""

    @classmethod
    def of(cls, parts: RankParts) -> DecodeGraphs:
        """For all batches of decodes that there can be, up to a limit. Drafts are decodes of their own."""
        sizes = capture_sizes(parts.max_num_seqs * (1 + parts.drafting.max_tokens))
        return cls(parts.decoder, parts.platform, sizes, parts.card.max_model_len, parts.drafting.features)

    @classmethod
    def of_drafts(cls, parts: RankParts) -> DecodeGraphs | None:
        """The graphs of the draft model; None if no draft model runs on this rank."""
        drafter = parts.drafter
        if not isinstance(drafter, HasDecoder) or not _capturable(drafter.decoder.ops):
            return None
        sizes = capture_sizes(parts.max_num_seqs * drafter.decodes)
        return cls(drafter.decoder, parts.platform, sizes, parts.card.max_model_len, features=False)

    def replaying(self, capture: Capture | None = None) -> Replaying:
        """Captures all sizes for the forward pass and the caches that it is called with: seconds to a minute."""
        return lambda forward, caches: self._replayed(forward, caches, capture or CudaCapture(self.platform.device))

    def _replayed(self, forward: ForwardPass, caches: KvCaches, capture: Capture) -> ReplayedDecodes:
        begun, free = time.perf_counter(), self.platform.memory().free
        made = self._captured(forward, caches, capture)
        taken, seconds = free - self.platform.memory().free, time.perf_counter() - begun
        _log.info("decodes captured", extra={"sizes": len(self.sizes), "memory": gib(taken), "seconds": seconds})
        return made

    def _captured(self, forward: ForwardPass, caches: KvCaches, capture: Capture) -> ReplayedDecodes:
        most = self.sizes[-1]
        length, size = self.max_model_len, self.decoder.ops.block_size
        states = self.decoder.state_bytes > 0
        inputs = DecodeInputs(self.platform.device, most, blocks_for(length, size), length, size, states=states)
        features = self.decoder.empty_features(most) if self.features else None
        return ReplayedDecodes(forward, caches, capture, self.sizes, inputs, features)


class RankGraphs(NamedTuple):
    """The graphs of the model and of its draft model."""

    model: DecodeGraphs | None
    drafts: DecodeGraphs | None

    @classmethod
    def of(cls, parts: RankParts) -> RankGraphs:
        """The graphs of a rank whose decode steps are captured."""
        return cls(DecodeGraphs.of(parts), DecodeGraphs.of_drafts(parts))

    def replaying(self, max_model_len: int) -> tuple[Replaying | None, Replaying | None]:
        """For contexts that may be shorter than was asked for."""
        model, drafts = (None if g is None else replace(g, max_model_len=max_model_len).replaying() for g in self)
        return model, drafts


NO_GRAPHS = RankGraphs(None, None)


def why_eager(
    decoder: CausalLm, platform: Platform, communicator: Communicator, pipeline: Pipeline, *, enforced: bool
) -> str | None:
    """Why decodes are not captured; None: they are."""
    if enforced:
        return "it was asked for"
    if not platform.captures_graphs:
        return f"there are no graphs on {platform.name}"
    if pipeline.stages > 1:
        return "rows come from another stage and go to one"
    if not decoder.capturable:
        return "what computes its layers may wait for the device"
    if not _capturable(decoder.ops):
        return f"{decoder.ops_name} operations cannot be captured"
    if communicator.world_size > 1 and not _capturable(communicator):
        return "these collectives cannot be captured"
    return None


def _capturable(part: object) -> bool:
    return isinstance(part, Capturable) and part.capturable
