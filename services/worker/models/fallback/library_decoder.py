"""A decoder whose forward pass is `transformers`', with our attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from services.worker.distributed.communicator import Communicator, Pipeline
from services.worker.distributed.lockstep import LockstepMember
from services.worker.distributed.torch_ranks import RankGroup
from services.worker.kv.copier import RankKvCache
from services.worker.kv.layer_groups import LayerGroups, allocate_caches, distinct
from services.worker.kv.state_pages import RankCheckpoints
from services.worker.models.config import ModelError
from services.worker.models.fallback.attention import (
    AttentionCall,
    AttentionLayers,
    CachedHeads,
    MixingLayers,
    PagedLayers,
    RecordedLayers,
    answered_by,
    cached_heads,
    heads_differ,
)
from services.worker.models.fallback.library_config import NO_INTERFACE
from services.worker.models.fallback.packed_products import PackedProduct
from services.worker.models.fallback.per_layer_inputs import PerLayerInputs, of_gemma4
from services.worker.models.fallback.pipeline_stage import PassOfStage, attending_layers, check_rows_suffice
from services.worker.models.fallback.tensor_parallel import PARTIAL
from services.worker.models.fallback.whole_experts import GroupMeeting, WholeExperts
from services.worker.models.sharding import PipelineStage
from services.worker.models.weights import ForwardPass, KvCaches, NamedModules
from services.worker.ops.interface import BatchMeta, InputRows, Ops, cached_head_dim
from shared.messages.kvstore import KvLayout
from shared.models.library_builds import first_line

_ROUNDED = 2**-7
"""How far a product in bfloat16 may be off."""


class HeadPlace(NamedTuple):
    """Which of a model's key and value heads a rank has."""

    rank: int
    world_size: int
    split: bool
    """Whether each rank has a share of them, and not all."""


class StagePlace(NamedTuple):
    """Which of a model's layers a rank has."""

    stage: PipelineStage
    pipeline: Pipeline
    passing: PassOfStage


class LibraryDecoder:
    """See :class:`services.worker.models.decoder.CausalLm`. A rank's share of a stage."""

    def __init__(
        self,
        model: nn.Module,
        ops: Ops,
        hidden_size: int,
        max_model_len: int,
        device: torch.device,
        place: HeadPlace,
        at: StagePlace,
        communicator: Communicator,
    ) -> None:
        """Raises ModelError where the model's attention is not of a kind that can be paged. Every rank of an engine of
        several stages must come here."""
        self._place = place
        self._stage, self._pipeline, self._passing = at
        self._model = model
        self._ops = ops
        self._hidden_size = hidden_size
        self._device = device
        self._base: nn.Module | None = None
        """The module whose output the head reads: some heads call a part of the base model."""
        self._computes_all = False
        """Whether the library gives the logits of every row, whichever are asked for."""
        self._named: dict[str, PackedProduct] = {}
        """The products that a pass computes once, of every row or of those whose logits are wanted."""
        self.token_head: Callable[[Tensor], Tensor] | None = None
        """Hidden states [k, hidden] → the logits [k, tokens] of the tokens of `judge_by`, in float32."""
        self._per_layer = PerLayerInputs.of_model(model)
        self._mutual_everywhere = not of_gemma4(model)
        if not self._stage.is_first:
            self._check_stage()
        self._calls = self._recorded_calls(max_model_len)
        self._attending = attending_layers(self._calls, self._stage, communicator)
        self._groups: LayerGroups | None = None
        self._heads = self._cached_heads()
        self._unrotated = dict[int, Tensor]()
        for dim in {heads.dim for heads in self._heads}:
            cosines, sines = torch.ones(max_model_len, dim // 2), torch.zeros(max_model_len, dim // 2)
            self._unrotated[dim] = torch.cat((cosines, sines), dim=1).to(device)

    def _cached_heads(self) -> tuple[CachedHeads, ...]:
        """Of each layer. Raises ModelError where they differ, and may not."""
        name = type(self._model).__name__
        try:
            heads = cached_heads(self._calls)
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None
        if heads_differ(self._calls):
            if self._stage.count > 1 or self._place.world_size > 1:
                raise ModelError(f"tp, pp: {name} has layers with different heads, which one rank computes")
            if self._ops.allocate_kv(1, 1, heads[0].dim)[0].shape[-1] != heads[0].dim:
                raise ModelError(f"kv_cache_dtype: {name} has layers with different heads, which are kept as they are")
        return heads

    def _recorded_calls(self, max_model_len: int) -> tuple[AttentionCall, ...]:
        recorded = RecordedLayers()
        ids = torch.zeros(2, dtype=torch.int32, device=self._device)
        owner: Any = self._model
        seen: list[nn.Module] = []
        rows: dict[nn.Module, list[int]] = {}

        def note(module: nn.Module, _inputs: object, output: Any) -> None:
            if isinstance(getattr(output, "last_hidden_state", None), Tensor):
                seen.append(module)

        def count(module: nn.Module, inputs: tuple[Tensor, ...], _output: object) -> None:
            rows.setdefault(module, []).append(inputs[0].numel() // inputs[0].shape[-1])

        hooks = [each.register_forward_hook(note) for each in {owner.base_model, owner.get_decoder()}]
        products = {name: each for name, each in self._model.named_modules() if isinstance(each, PackedProduct)}
        hooks += [each.register_forward_hook(count) for each in products.values()]
        name = type(self._model).__name__
        try:
            with torch.inference_mode():
                given = self._run(ids, torch.arange(2, device=self._device), ids[:1], recorded, rows=self._some_rows(2))
        except ModelError:
            raise
        except Exception as error:  # of the library: it looks for something that is not as it made it
            raise ModelError(f"{name}: transformers cannot compute the model here: {first_line(error)}") from error
        finally:
            for hook in hooks:
                hook.remove()
        self._base = seen[-1] if seen else None
        self._computes_all = self._stage.is_last and len(given) > 1
        tied = getattr(owner.config, "tie_word_embeddings", False)
        head = None if tied else owner.get_output_embeddings()
        for path, product in products.items():
            # Rows of an expert are others in each step, though here they may be all.
            if rows.get(product) == ([1] if product is head else [2]) and "expert" not in path:
                self._named[path] = product
        if not recorded.calls:
            raise ModelError(NO_INTERFACE.format(name))
        if (window := _unasked_window(owner.config, recorded.calls)) is not None and window < max_model_len:
            raise ModelError(
                f"{name}: sliding_window {window} is kept by the library's cache, and not asked of attention: this is "
                f"not supported beyond a max_model_len of {window}"
            )
        size = self._ops.block_size
        if (odd := next((each.chunk for each in recorded.calls if each.chunk and each.chunk % size), None)) is not None:
            raise ModelError(f"{name}: attention_chunk_size {odd} is not a multiple of block_size {size}")
        if (odd := next((each.key_dim for each in recorded.calls if each.key_dim % 2), None)) is not None:
            raise ModelError(f"{name}: heads of {odd} elements are not supported")
        if not self._stage.is_last and given.dtype != (sent := self._ops.empty_rows(0, 1).dtype):
            raise ModelError(f"pp: between its layers {name} has rows of {given.dtype}, and {sent} is sent")
        return tuple(recorded.calls)

    def _some_rows(self, count: int) -> Tensor | None:
        """[count, hidden] as a stage before could have sent them; None on the first."""
        if self._stage.is_first:
            return None
        rows = self._ops.empty_rows(count, self._hidden_size)
        return rows.copy_(torch.linspace(-1.0, 1.0, rows.numel()).view(rows.shape))

    @torch.inference_mode()
    def _check_stage(self) -> None:
        """Raises ModelError where the rows of the stage before are not all that this one needs of it."""
        rows, ids = self._some_rows(2), torch.arange(2, dtype=torch.int32, device=self._device)
        assert rows is not None

        def run(ids: Tensor, rows: Tensor) -> Tensor:
            return self._run(ids, positions, positions, MixingLayers(), rows=rows)

        positions = ids.clone()
        self._passing.settle(lambda: self._call(ids, positions, positions, RecordedLayers()), rows)
        check_rows_suffice(type(self._model).__name__, run, rows)

    @property
    def ops_name(self) -> str:
        """For logs and reports."""
        return f"transformers {transformers.__version__}, attention and products {self._ops.name}"

    @property
    def ops(self) -> Ops:
        """The operations that it attends by."""
        return self._ops

    @property
    def fastest_pass(self) -> ForwardPass:
        """`forward`."""
        return self.forward

    @property
    def capturable(self) -> bool:
        """The library's code may wait for the device."""
        return False

    @property
    def wire(self) -> str:
        """See `CausalLm.wire`."""
        return f"rows of {self._ops.empty_rows(0, 1).dtype}" if self._stage.count > 1 else "no rows"

    @property
    def has_features(self) -> bool:
        """Whether `forward` can fill features; those are the last stage's."""
        return self._base is not None or not self._stage.is_last

    def named_modules(self) -> NamedModules:
        """What adapters may change, by the library's names."""
        products = {name.removesuffix(PARTIAL): each.named() for name, each in self._named.items()}
        return NamedModules(products, self._passing.dropped)

    def multiply_by(self, ops: Ops) -> None:
        """Has these products computed by `ops`, which can do with them as they are packed."""
        for each in self._named.values():
            each.ops = ops

    @torch.inference_mode()
    def judge_by(self, weights: Tensor, biases: Tensor) -> None:
        """Makes `token_head` of some rows of the head: weights [tokens, hidden] and biases [tokens]. Every rank of the
        last stage must come here. Raises ModelError where the library's logits are not what these rows make of
        features, or a multiple of it, as Cohere's."""
        weights, biases, scale = weights.to(self._device), biases.to(self._device), self._logits_scale()

        def head(states: Tensor) -> Tensor:
            return F.linear(states, weights, biases) * scale

        self.token_head = head

    def _logits_scale(self) -> float:
        """What a pass multiplies the head's outputs by: in a trial pass they are known numbers."""
        name, owner = type(self._model).__name__, cast(Any, self._model)
        known: list[Tensor] = []
        features = self.empty_features(2)

        def say(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if inputs[0].numel() == features.numel() and torch.equal(inputs[0].reshape(features.shape), features):
                known.append(torch.linspace(-100, 100, output.numel()).to(output).view(output.shape))
            return known[-1] if known else output

        ids = torch.arange(2, dtype=torch.int32, device=self._device)
        handle = owner.get_output_embeddings().register_forward_hook(say)
        try:
            with self._hidden_states(features):
                logits = self._run(ids, ids, ids, RecordedLayers(), rows=self._some_rows(2)).flatten().double()
        finally:
            handle.remove()
        given = known[0].flatten().double() if known else logits.new_empty(0)
        scale = float(logits @ given / (given @ given)) if given.shape == logits.shape else 0.0
        if not scale or not torch.allclose(logits, given * scale, rtol=_ROUNDED, atol=_ROUNDED * abs(scale)):
            raise ModelError(f"{name}: its logits are more than a product with its head, so its tokens judge nothing")
        return scale

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self._device

    @property
    def windows(self) -> tuple[int | None, ...]:
        """See `CausalLm.windows`. Nobody sees further back than a chunk is long."""
        return self._attending.windows

    def use_groups(self, groups: LayerGroups) -> None:
        """See `CausalLm.use_groups`."""
        self._groups = groups

    def allocate_kv(self, num_blocks: int, sequences: int = 0) -> KvCaches:
        """Caches of `num_blocks` blocks for every layer."""
        heads, dim = self._heads[0]
        return allocate_caches(len(self._calls), self._groups, lambda: self._ops.allocate_kv(num_blocks, heads, dim))

    def share_kv(self, caches: KvCaches, model: str, checkpoints: RankCheckpoints | None = None) -> RankKvCache | None:
        """See :meth:`services.worker.models.decoder.CausalLm.share_kv`."""
        keys, different = caches[0][0], caches
        heads, dim = self._heads[0].number, cached_head_dim(keys.dtype, self._heads[0].dim)
        if heads_differ(self._calls):  # other operations would have the others' elements elsewhere in a block
            model = blake2b(f"{model} {self._ops.name}".encode(), digest_size=len(model) // 2 or 1).hexdigest()
        layers, first_layer = len(self._attending.windows), self._attending.before
        if self._groups is not None:
            different, model = distinct(caches), self._groups.digest(model)
            layers, first_layer = sum(self._groups.stages), self._groups.first_cache
        return RankKvCache(
            layout=KvLayout(
                model=model,
                dtype=str(keys.dtype).removeprefix("torch."),
                layers=layers,
                kv_heads=heads * self._place.world_size if self._place.split else heads,
                head_dim=dim,
                block_size=self._ops.block_size,
            ),
            first_head=heads * self._place.rank if self._place.split else 0,
            num_heads=heads,
            writes=self._place.split or self._place.rank == 0,
            num_blocks=len(keys),
            copier=self._ops.kv_copier(different, dim),
            first_layer=first_layer,
            num_layers=len(different),
        )

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        caches = len(self._calls) if self._groups is None else self._groups.caches
        return caches * self._ops.kv_block_bytes(*self._heads[0])

    @property
    def state_bytes(self) -> int:
        """No layer has a state."""
        return 0

    @property
    def checkpoint_pages(self) -> None:
        """There are no checkpoints of states."""

    def empty_features(self, rows: int) -> Tensor:
        """[rows, hidden]."""
        return self._ops.empty_rows(rows, self._hidden_size)

    @property
    def rotations(self) -> None:
        """See `CausalLm.rotations`."""
        return None

    @torch.inference_mode()
    def check_inputs(self, *, of_clients: bool) -> None:
        """See `CausalLm.check_inputs`: its embedding's own rows have to come to the same as their tokens. Of an image
        some models read a padding's token beside its embedding, so these have to come to that."""
        if not self._stage.is_first:
            return  # no token is read there, see `check_rows_suffice`
        name, owner = type(self._model).__name__, cast(Any, self._model)
        ids = torch.arange(2, dtype=torch.int32, device=self._device)
        if not of_clients and self._per_layer is not None:
            ids = torch.full_like(ids, self._per_layer.padding)
        try:
            own = InputRows(ids, owner.get_input_embeddings()(ids.long()))
            logits = [self._run(ids, ids, ids, RecordedLayers(), inputs) for inputs in (None, own)]
        except Exception as error:  # of the library, or of the model's own code
            raise ModelError(f"enable_prompt_embeds: {name} takes no embeddings: {first_line(error)}") from None
        if not torch.equal(*logits):
            raise ModelError(f"enable_prompt_embeds: {name} reads more of a token than its embedding")

    def forward(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """See `Decoder.forward`; every rank of the last stage computes the head."""
        layers = self._paged_layers(meta, caches)
        rows = None
        if not self._stage.is_first:
            rows = self._pipeline.receive(self._ops.empty_rows(len(ids), self._hidden_size))
        with self._hidden_states(features if self._stage.is_last else None):
            logits = self._run(ids, meta.positions, meta.logits_rows, layers, meta.inputs, rows)
        layers.check_complete()
        if not self._stage.is_last:
            self._pipeline.send(logits.contiguous())
            return None
        return logits.float() if len(meta.logits_rows) and self._place.rank == 0 else None

    def _paged_layers(self, meta: BatchMeta, caches: KvCaches) -> PagedLayers:
        """What answers a step's pass."""
        group_of = () if self._groups is None else self._groups.group_of
        return PagedLayers(
            *(self._calls, self._ops, meta, caches, self._heads, self._unrotated, group_of),
            mutual_everywhere=self._mutual_everywhere,
        )

    @contextmanager
    def _hidden_states(self, features: Tensor | None) -> Iterator[None]:
        """Copies the last hidden states of the pass within to `features`: what the base model gives its head."""
        if features is None or self._base is None:
            assert features is None, "a model whose hidden states are not known makes no vectors"
            yield
            return

        def copy(_module: nn.Module, _inputs: object, output: Any) -> None:
            features.copy_(output.last_hidden_state[0])

        handle = self._base.register_forward_hook(copy)
        try:
            yield
        finally:
            handle.remove()

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor,
        layers: AttentionLayers,
        inputs: InputRows | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """The logits of `logits_rows`; of stages before the last, the rows behind its layers. `inputs`: see
        `BatchMeta.inputs`; `rows`: of the stage before."""
        output = self._passing.run(lambda: self._call(ids, positions, logits_rows, layers, inputs), rows)
        of_all: Tensor = (output if isinstance(output, Tensor) else output.logits)[0]
        return of_all[logits_rows.long()] if self._computes_all else of_all

    def _call(
        self,
        ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor,
        layers: AttentionLayers,
        inputs: InputRows | None = None,
    ) -> Any:
        """The library's pass."""
        begin = {"input_ids": ids.long().unsqueeze(0)}
        if inputs is not None and self._stage.is_first:
            owner: Any = self._model
            begin = {"inputs_embeds": inputs.put_into(owner.get_input_embeddings()(ids.long())).unsqueeze(0)}
            if self._per_layer is not None:
                begin["per_layer_inputs"] = self._per_layer.beside(inputs, ids)
        with answered_by(layers):
            return self._model(
                **begin,
                position_ids=positions.long().unsqueeze(0),
                use_cache=False,
                logits_to_keep=logits_rows.long(),
            )


def _unasked_window(config: Any, calls: Sequence[AttentionCall]) -> int | None:
    """Behind which the library's cache would forget, though no layer says so."""
    text = config.get_text_config(decoder=True)
    window: object = getattr(text, "sliding_window", None)
    if getattr(text, "layer_types", None) is not None or any(call.window is not None for call in calls):
        return None
    return window if isinstance(window, int) else None


class GroupLibraryDecoder(LockstepMember, LibraryDecoder):
    """A `LibraryDecoder` that meets the group's other ranks in each mixture."""

    def __init__(
        self, group: RankGroup, meeting: GroupMeeting, mixtures: Sequence[WholeExperts], *decoder: Any
    ) -> None:
        """`mixtures`: the model's, in the order of a pass. `decoder`: what a `LibraryDecoder` is made of."""
        super().__init__(*decoder)
        self.lockstep = group.lockstep
        self._engines, self._meeting, self._mixtures = group.place.engines, meeting, tuple(mixtures)

    @property
    def wire(self) -> str:
        """See `LibraryDecoder.wire`."""
        return f"{super().wire}, of {self._engines} data-parallel engines"

    def forward(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """See `Decoder.forward`; it is a step of the whole group. Raises RankGone, StepsOutOfSync."""
        self._meeting.begin(self.lockstep.begin(len(ids), len(ids)))
        return super().forward(ids, meta, caches, features)

    def execute_dummy_step(self) -> None:
        """See `LockstepMember.execute_dummy_step`."""
        self._meeting.begin(self.lockstep.begin(0, 0))
        for mixture in self._mixtures:
            mixture.compute_for_others()
