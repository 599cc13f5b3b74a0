"""Which share of a model each rank holds.

*Tensor parallelism.* Heads, MLP columns (of every expert) and words are split (Shoeybi et al., "Megatron-LM",
arXiv:1909.08053): each rank computes partial sums of the embedding and of the attention's and the MLP's outputs, which
are added up over the ranks. Key/value heads are replicated where there are fewer of them than ranks.

*Expert parallelism* (Lepikhin et al., "GShard", arXiv:2006.16668), if it is enabled, gives ranks whole experts in place
of columns of all; the sum over the ranks is the same.

*Pipeline parallelism.* Layers are split into stages (Huang et al., "GPipe", arXiv:1811.06965). The ranks of a stage
share its layers by tensor parallelism: rank = stage * ranks of a stage + its place in the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

import msgspec
from msgspec import Struct

from services.worker.models.config import MambaConfig, ModelConfig, ModelDescription, ModelError, StateConfig
from services.worker.models.expert_parallel.placement import ExpertPlacement


class MixerShard(Struct, frozen=True):
    """What one rank holds of each mixer with states, as half-open ranges."""

    heads: tuple[int, int]
    groups: tuple[int, int]
    """Of neighbouring heads; a single one is on every rank."""
    norm_parts: int
    """Over so many ranks the norm of a group goes."""

    @property
    def num_heads(self) -> int:
        """Heads of this rank."""
        return self.heads[1] - self.heads[0]

    @property
    def num_groups(self) -> int:
        """Groups of this rank."""
        return self.groups[1] - self.groups[0]

    def own(self, states: StateConfig) -> StateConfig:
        """The sizes of what it holds."""
        return states.share(self.num_heads, self.num_groups)

    def elements(self, head_dim: int) -> tuple[int, int]:
        """Of all heads' elements."""
        return self.heads[0] * head_dim, self.heads[1] * head_dim


class LayerShard(Struct, frozen=True):
    """What one rank holds of each layer, as half-open ranges over the whole model's heads, columns and words."""

    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    first_of_kv_heads: bool
    """No lower rank holds the same key/value heads."""
    mlp: tuple[int, int]
    experts: tuple[int, int]
    """The columns of each expert that this rank holds, as (start, end); (0, 0) if the model has none."""
    shared_expert: tuple[int, int]
    """The columns of the shared expert that this rank holds, as (start, end)."""
    vocab: tuple[int, int]
    padded_vocab: int
    """Words of each rank's share of the embedding and the logits, padding included: the same on every rank."""
    rank: int = 0
    """Its number among the ranks that `placements` are of."""
    placements: tuple[ExpertPlacement, ...] = ()
    """Expert parallelism: which experts each rank has of every layer of the model, whole. Empty: a share of all."""
    mixer: MixerShard | None = None
    """None: no layer has states."""

    @property
    def experts_digest(self) -> str:
        """Tells the placements of all ranks from any others."""
        return blake2b(msgspec.json.encode(self.placements), digest_size=8).hexdigest()

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.heads[1] - self.heads[0]

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of this rank."""
        return self.kv_heads[1] - self.kv_heads[0]


def shard_of(
    config: ModelConfig,
    rank: int,
    world_size: int,
    placements: tuple[ExpertPlacement, ...] = (),
    expert_rank: int | None = None,
) -> LayerShard:
    """What `rank` of a stage holds; `placements`: see `LayerShard`. `expert_rank`: its number among the ranks that
    these are of; None: the same. Raises ModelError where the model does not divide by `world_size`."""
    mixture = config.mixture
    experts, shared = (mixture.intermediate_size, mixture.shared_size or 0) if mixture is not None else (0, 0)
    for key, count in (
        ("num_attention_heads", config.num_heads),
        ("intermediate_size", config.intermediate_size),
        ("moe_intermediate_size", 0 if placements else experts),
        ("shared_expert_intermediate_size", shared),
    ):
        if count % world_size:
            raise ModelError(
                f"{key} {count} does not divide over {world_size} tensor-parallel ranks: choose another --tp"
            )
    for each in (each for layer in config.layers for each in layer.following):
        if (each.columns or config.hidden_size) % world_size:
            raise ModelError(
                f"layer {each.number} has {each.columns or config.hidden_size} columns, which do not divide over "
                f"{world_size} tensor-parallel ranks: choose another --tp"
            )
    if config.num_kv_heads % world_size and world_size % config.num_kv_heads:
        raise ModelError(
            f"num_key_value_heads {config.num_kv_heads} neither divides over {world_size} ranks nor divides them"
        )
    words = -(-config.vocab_size // world_size)
    return LayerShard(
        heads=_part(config.num_heads, rank, world_size),
        kv_heads=_kv_part(config.num_kv_heads, rank, world_size),
        first_of_kv_heads=rank == 0
        or _kv_part(config.num_kv_heads, rank - 1, world_size) != _kv_part(config.num_kv_heads, rank, world_size),
        mlp=_part(config.intermediate_size, rank, world_size),
        experts=(0, experts) if placements else _part(experts, rank, world_size),
        shared_expert=_part(shared, rank, world_size),
        vocab=(min(rank * words, config.vocab_size), min((rank + 1) * words, config.vocab_size)),
        padded_vocab=words,
        rank=rank if expert_rank is None else expert_rank,
        placements=placements,
        mixer=None if config.states is None else _mixer_part(config.states, rank, world_size),
    )


def _mixer_part(states: StateConfig, rank: int, world_size: int) -> MixerShard:
    """Whole groups; or heads of the only one, where a norm over all of them can be summed up."""
    one = isinstance(states, MambaConfig) and states.groups == 1
    for what, count in (("heads", states.heads), ("groups of heads", world_size if one else states.groups)):
        if count % world_size:
            raise ModelError(f"{states.kind}: {count} {what} do not divide over {world_size} tensor-parallel ranks")
    groups = (0, 1) if one else _part(states.groups, rank, world_size)
    return MixerShard(_part(states.heads, rank, world_size), groups, world_size if one else 1)


def columns_of(config: ModelConfig, share: LayerShard, size: int) -> tuple[int, int]:
    """A rank's part of so many columns of a layer's own, from and to; they divide as heads do."""
    first, end = (size * head // config.num_heads for head in share.heads)
    return first, end


def _part(count: int, rank: int, world_size: int) -> tuple[int, int]:
    size = count // world_size
    return rank * size, (rank + 1) * size


def _kv_part(count: int, rank: int, world_size: int) -> tuple[int, int]:
    if count >= world_size:
        return _part(count, rank, world_size)
    head = rank * count // world_size
    return head, head + 1


class PipelineStage(Struct, frozen=True):
    """A part of the pipeline: which layers it computes."""

    index: int
    count: int
    """Stages of the engine."""
    first_layer: int
    end_layer: int
    """The one behind its last."""

    @property
    def is_first(self) -> bool:
        """Whether this stage computes the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """It has the head, and draws."""
        return self.index == self.count - 1

    @property
    def num_layers(self) -> int:
        """Layers of this stage."""
        return self.end_layer - self.first_layer


def stage_of(config: ModelDescription, index: int, count: int, split: Sequence[int] | None = None) -> PipelineStage:
    """The layers of stage `index`. `split`: layers of each stage, where they are not to be as even as can be; two that
    are beside each other count as one, and so do a shared block and the mixer behind it.

    Raises ModelError where they cannot be split so.
    """
    first_of = list(range(config.num_layers))
    if isinstance(config, ModelConfig):
        behind = [layer.beside or before.depth is not None for before, layer in pairwise(config.layers)]
        first_of = [0, *(number for number, joined in enumerate(behind, 1) if not joined)]
    whole = len(first_of)
    layers = list(split) if split else _even(whole, count)
    if len(layers) != count or sum(layers) != whole or min(layers) < 1:
        shown = ",".join(map(str, layers))
        raise ModelError(f"{whole} layers cannot be split as {shown} over {count} pipeline stages")
    first = sum(layers[:index])
    ends = [*first_of, config.num_layers]
    return PipelineStage(index, count, ends[first], ends[first + layers[index]])


def _even(layers: int, count: int) -> list[int]:
    """Layers of each stage; the remainder goes to the stages before the last, which also has the head."""
    size, more = divmod(layers, count)
    return [size + (count - 1 - more <= stage < count - 1) for stage in range(count)]
