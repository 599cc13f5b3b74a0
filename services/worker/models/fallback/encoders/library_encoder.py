"""An encoder whose forward pass is `transformers`': every token sees its whole prompt, before it and behind it.

So a prompt is computed in one step, and nothing of it is kept: keys and values live no longer than a layer. The rows of
all prompts of a step lie behind each other, as one sequence does for the library; attention looks at each prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from services.worker.kv.copier import RankKvCache
from services.worker.kv.layer_groups import LayerGroups
from services.worker.kv.state_pages import RankCheckpoints
from services.worker.models.checkpoint import check_matrices, open_checkpoint
from services.worker.models.config import ModelError
from services.worker.models.fallback.encoders.families import FAMILIES
from services.worker.models.fallback.encoders.prompt_attention import NAME, prompts_of, register
from services.worker.models.fallback.library_config import LibraryConfig, settings_digest, weights_dtype
from services.worker.models.fallback.packed_products import pack_products
from services.worker.models.pooling.classification import SUFFIX, TOKEN_SUFFIX, ClassifierHead
from services.worker.models.weights import ForwardPass, KvCaches
from services.worker.ops.interface import BatchMeta, Ops, cached_head_dim
from services.worker.ops.quantized import Scheme
from shared.messages.generation import PoolingType
from shared.messages.kvstore import KvLayout
from shared.models.library_builds import BUILDING, first_line
from shared.models.tokenizer_files import TokenizerUnusable, load_tokenizer

_LAYERS = ("encoder", "transformer", "layers")
"""Where families have their layers."""
_HEADS, _HEAD_SIZE = 1, 16
"""Of the cache that nothing is written to: blocks only count what room prompts have."""


class LibraryEncoderModel:
    """An encoder in a directory, and what computes it."""

    def __init__(self, folder: Path) -> None:
        """Reads the configuration; takes no memory for weights. Raises ModelError."""
        self._folder = folder
        try:
            self.config = self._described(AutoConfig.from_pretrained(folder, local_files_only=True))
        except ModelError as error:
            raise ModelError(f"{folder}: {error}") from None
        except KeyError as error:  # an activation, say
            raise ModelError(f"{folder}: transformers cannot build the model: it does not know {error}") from None
        except Exception as error:  # whatever the library raises for a configuration
            raise ModelError(f"{folder}: transformers cannot build the model: {first_line(error)}") from None

    def _described(self, own: Any) -> LibraryConfig:
        self._own, self._family = own, FAMILIES[own.model_type]
        names: list[str] = own.architectures or []
        heads = {SUFFIX: self._family.head, TOKEN_SUFFIX: self._family.token_head, "": None}
        self._kind = next(end for end in heads if not end or any(name.endswith(end) for name in names))
        self._head = heads[self._kind]
        if self._kind and self._head is None:
            raise ModelError(f"{names[0]}: transformers has no such model of model_type {own.model_type}")
        if getattr(own, "quantization_config", None) is not None:
            raise ModelError("quantization_config is set: quantized checkpoints are not supported")
        positions = own.max_position_embeddings - _first_position(self._family.padding(own))
        if positions < 1:
            raise ModelError(f"max_position_embeddings {own.max_position_embeddings} leaves no token a position")
        own._attn_implementation = NAME
        own.use_cache = False
        register()
        with BUILDING, torch.device("meta"):
            model = self._automatic.from_config(own)
        return LibraryConfig(
            architecture=type(model).__name__,
            dtype=weights_dtype(own),
            vocab_size=own.vocab_size,
            hidden_size=own.hidden_size,
            num_layers=own.num_hidden_layers,
            max_positions=positions,
            eos_token_ids=(),
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            settings_digest=settings_digest(own),
        )

    @property
    def head_pooling(self) -> PoolingType:
        """What a head of this model that classifies prompts reads."""
        return self._family.pooling(self._own)

    @property
    def _automatic(self) -> Any:
        own: Any = transformers
        return getattr(own, f"AutoModel{self._kind}")

    @torch.inference_mode()
    def load(
        self, ops: Ops, dtype: torch.dtype, device: torch.device, *, dummy: bool, quantization: Scheme | None
    ) -> tuple[LibraryEncoder, ClassifierHead | None]:
        """What computes hidden states, and the classification head if there is one; with random weights where `dummy`.
        `quantization` is what the layers' products are rounded to. Raises ModelError for a broken checkpoint."""
        model = (self._dummy(dtype) if dummy else self._read(dtype)).to(device)
        base: Any = model.base_model if self._kind else model
        head = None if self._head is None else partial(_logits, self._head, model, dtype)
        if self._family.adapt is not None:
            try:
                self._family.adapt(base)
            except ModelError as error:
                raise ModelError(f"{self._folder}: {error}") from None
        layers = next(getattr(base, name) for name in _LAYERS if hasattr(base, name))
        pack_products(layers, ops, quantization)
        padding = self._family.padding(self._own)
        separator = _separator(self._folder) if self._family.segments and self._own.type_vocab_size > 1 else None
        rows = partial(self._family.rows, model) if self._kind == SUFFIX and self._family.rows else None
        return LibraryEncoder(base, ops, self.config, padding, separator, rows), head

    def _read(self, dtype: torch.dtype) -> nn.Module:
        own: Any = transformers
        own.logging.set_verbosity_error()  # what it warns of is looked at here
        own.logging.disable_progress_bar()
        with open_checkpoint(self._folder, dtype) as files:
            check_matrices(files)
        try:
            with BUILDING:
                model, info = self._automatic.from_pretrained(
                    self._folder,
                    config=self._own,
                    dtype=dtype,
                    attn_implementation=NAME,
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                )
        except Exception as error:  # of the library, or of safetensors
            raise ModelError(f"{self._folder}: transformers cannot read the checkpoint: {first_line(error)}") from None
        for name in sorted(info["missing_keys"]):
            if self._kind or not name.startswith("pooler."):  # which only classifiers ask
                raise ModelError(f"{self._folder}: the checkpoint has no tensor {name}")
        ready: nn.Module = model.eval().requires_grad_(False)
        return ready

    def _dummy(self, dtype: torch.dtype) -> nn.Module:
        with BUILDING, torch.random.fork_rng():
            torch.manual_seed(0)
            model: nn.Module = self._automatic.from_config(self._own, dtype=dtype)
        return model.eval().requires_grad_(False)


def _separator(folder: Path) -> int | None:
    """The token behind each text of a pair; None where the tokenizer has none. Raises ModelError."""
    try:
        files = load_tokenizer(folder)
    except TokenizerUnusable as error:
        raise ModelError(str(error)) from None
    named = files.special_tokens.get("sep_token")
    return None if named is None else files.tokenizer.token_to_id(named)


def _logits(head: Callable[[Any, Tensor], Tensor], model: nn.Module, dtype: torch.dtype, states: Tensor) -> Tensor:
    """See `ClassifierHead`; computed in the model's dtype."""
    return head(model, states.to(dtype)).float()


class LibraryEncoder:
    """See :class:`services.worker.models.decoder.CausalLm`. The only rank of its engine."""

    has_features = True
    capturable = False
    wire = "no rows"

    def __init__(
        self,
        model: nn.Module,
        ops: Ops,
        config: LibraryConfig,
        padding: int | None,
        separator: int | None,
        rows: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """`padding`: see `EncoderFamily`. `separator`: the token behind the first text of a pair, where the model tells
        texts apart. `rows`: what is made of hidden states before they are pooled."""
        self._model = model
        self._ops = ops
        self._config = config
        self._padding = padding
        self._separator = separator
        self._rows = rows

    @property
    def ops_name(self) -> str:
        """For logs and reports."""
        return f"transformers {transformers.__version__}, products {self._ops.name}"

    @property
    def ops(self) -> Ops:
        """The operations that it multiplies by."""
        return self._ops

    @property
    def fastest_pass(self) -> ForwardPass:
        """`forward`."""
        return self.forward

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the one cache that it has."""
        return (None,)

    def use_groups(self, groups: LayerGroups) -> None:
        """Raises ValueError: nothing is kept of a prompt, so no layers differ in what they keep."""
        raise ValueError(f"an encoder has no {groups}")

    def allocate_kv(self, num_blocks: int, sequences: int = 0) -> KvCaches:
        """A cache that nothing is written to."""
        return [self._ops.allocate_kv(num_blocks, _HEADS, _HEAD_SIZE)]

    def share_kv(self, caches: KvCaches, model: str, checkpoints: RankCheckpoints | None = None) -> RankKvCache:
        """See :meth:`services.worker.models.decoder.Decoder.share_kv`; no prompt of an encoder is saved or loaded."""
        keys = caches[0][0]
        dim = cached_head_dim(keys.dtype, _HEAD_SIZE)
        return RankKvCache(
            layout=KvLayout(
                model=model,
                dtype=str(keys.dtype).removeprefix("torch."),
                layers=1,
                kv_heads=_HEADS,
                head_dim=dim,
                block_size=self._ops.block_size,
            ),
            first_head=0,
            num_heads=_HEADS,
            writes=True,
            num_blocks=len(keys),
            copier=self._ops.kv_copier(caches, dim),
            first_layer=0,
            num_layers=1,
        )

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block."""
        return self._ops.kv_block_bytes(_HEADS, _HEAD_SIZE)

    @property
    def state_bytes(self) -> int:
        """No layer has a state."""
        return 0

    @property
    def checkpoint_pages(self) -> None:
        """There are no checkpoints of states."""

    def empty_features(self, rows: int) -> Tensor:
        """[rows, hidden]."""
        return self._ops.empty_rows(rows, self._config.hidden_size)

    @property
    def rotations(self) -> None:
        """See `CausalLm.rotations`."""
        return None

    def check_inputs(self, *, of_clients: bool) -> None:
        """See `CausalLm.check_inputs`."""
        raise ModelError("enable_prompt_embeds: an encoder generates no text")

    def forward(self, ids: Tensor, meta: BatchMeta, caches: KvCaches, features: Tensor | None = None) -> Tensor | None:
        """Fills `features`. There is nothing to draw from: logits, as warm-up asks for them, are zeros."""
        lengths = [1] * meta.num_decodes + [rows for rows, _ in meta.prefills]
        separator = self._separator
        more = {} if separator is None else {"token_type_ids": _segments(ids, lengths, separator).unsqueeze(0)}
        model: Any = self._model
        with prompts_of(lengths):
            output = model(
                input_ids=ids.long().unsqueeze(0),
                position_ids=_positions(ids, meta.positions, lengths, self._padding).unsqueeze(0),
                **more,
            )
        if features is not None:
            hidden = output.last_hidden_state[0]
            features.copy_(hidden if self._rows is None else self._rows(hidden))
        rows = len(meta.logits_rows)
        return torch.zeros(rows, self._config.vocab_size, device=ids.device) if rows else None


def _first_position(padding: int | None) -> int:
    return 0 if padding is None else padding + 1


def _positions(ids: Tensor, positions: Tensor, lengths: list[int], padding: int | None) -> Tensor:
    """int64 [n], as the library numbers the tokens of each prompt; see `EncoderFamily.padding`. A client may send that
    token itself."""
    if padding is None:
        return positions.long()
    counted = torch.ne(ids, padding).long()
    parts = [part.cumsum(0) * part for part in torch.split(counted, lengths)]
    return torch.cat(parts) + padding


def _segments(ids: Tensor, lengths: list[int], separator: int) -> Tensor:
    """int64 [n]: 0 for the tokens up to each prompt's first separator, 1 for those behind it: of a single text none is,
    as it ends there."""
    found = torch.eq(ids, separator).long()
    parts = [(part.cumsum(0) - part).clamp(max=1) for part in torch.split(found, lengths)]
    return torch.cat(parts)
