"""A stage of a model of `transformers`: its own layers of the library's modules, in the library's own pass.

Layers of other stages are stood in for, so that the library counts its layers as ever. Those before a stage's own give
the rows that the stage before has sent; behind its own the pass ends. So nothing that the library computes of its
embedding counts on later stages, and no plan (`_pp_plan`) is needed, which half of its decoders lack. Layers that read
anything else of what comes before them are found out by `check_rows_suffice`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.worker.distributed.communicator import Communicator
from services.worker.models.config import ModelError
from services.worker.models.fallback.attention import AttentionCall
from services.worker.models.sharding import PipelineStage
from shared.models.library_builds import first_line


class PassOfStage:
    """What the library's pass over a stage's layers begins with and ends with. Owned by one model."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        """[1, n, hidden] of the stage before."""
        self.in_tuples = False
        """Whether a layer's output is the first of several."""
        self.first: nn.Module | None = None
        """The stage's first layer, where there are layers before it."""
        self.last: nn.Module | None = None
        """The stage's last layer, where there are layers behind it."""
        self.dropped: tuple[str, ...] = ()
        """Beginnings of the names of what other stages have, in a checkpoint too."""

    def run(self, call: Callable[[], Any], rows: Tensor | None) -> Any:
        """What `call` gives, which is a pass of the library; of stages before the last, the rows [1, n, hidden] behind
        its layers. `rows` [n, hidden]: of the stage before; None on the first."""
        self.rows = None if rows is None else rows.unsqueeze(0)
        handle = None if self.last is None else self.last.register_forward_hook(_end_pass)
        try:
            return call()
        except _PassEnd as end:
            return end.rows
        finally:
            self.rows = None
            if handle is not None:
                handle.remove()

    def settle(self, call: Callable[[], Any], rows: Tensor) -> None:
        """Finds out how layers give their outputs, by two passes at the most. `rows`: of the stage before.

        Raises ModelError where the layers of a stage begin with something else than what those before give."""
        assert self.first is not None, "the first stage is given no rows"
        for self.in_tuples in (False, True):
            with self._first_inputs() as given:
                try:
                    self.run(call, rows)
                except Exception as error:  # of the library, which was given what it does not know
                    complaint = first_line(error)
                else:
                    complaint = "they begin with something else than what those before give"
            if given and isinstance(given[0], Tensor) and torch.equal(given[0][0], rows):
                return
        raise ModelError(f"pp: the layers of transformers cannot be split into stages: {complaint}")

    @contextmanager
    def _first_inputs(self) -> Iterator[list[object]]:
        """What the stage's first layer is given within."""
        given: list[object] = []

        def note(_module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            given.append(positional[0] if positional else named.get("hidden_states"))

        assert self.first is not None
        handle = self.first.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield given
        finally:
            handle.remove()


class AttendingLayers(NamedTuple):
    """Of all stages: what a cache of keys and values has a part for."""

    windows: tuple[int | None, ...]
    """Positions that each sees; None: all."""
    before: int
    """How many are on stages before this one."""


class _Attending(Struct):
    """One rank's, for the others."""

    kv_heads: int
    key_dim: int
    windows: tuple[int | None, ...]


def attending_layers(
    calls: Sequence[AttentionCall], stage: PipelineStage, communicator: Communicator
) -> AttendingLayers:
    """`calls`: of this rank's layers. Every rank of an engine of several stages must come here. Raises ModelError where
    stages could not share block tables."""
    # Nobody sees further back than a chunk is long.
    own = _Attending(calls[0].kv_heads, calls[0].key_dim, tuple(call.window or call.chunk for call in calls))
    if stage.count == 1:
        return AttendingLayers(own.windows, 0)
    said = communicator.all_gather(msgspec.json.encode(own).decode())
    stages = [msgspec.json.decode(each, type=_Attending) for each in said[:: len(said) // stage.count]]
    if len({(each.kv_heads, each.key_dim) for each in stages}) > 1:
        raise ModelError("layers with different heads are not supported")
    windows = tuple(window for each in stages for window in each.windows)
    if len(calls) != stage.num_layers and any(windows):  # block tables are shared by layers
        raise ModelError(f"pp: {stage.num_layers} layers with windows attend {len(calls)} times, and not once each")
    return AttendingLayers(windows, sum(len(each.windows) for each in stages[: stage.index]))


def check_rows_suffice(name: str, run: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> None:
    """Raises ModelError where what a later stage computes depends on more than its rows and positions. `run`: ids and
    rows → what the stage gives, a function of what attention is given. `rows` [n, hidden]."""
    ids = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    try:
        same = torch.equal(run(ids, rows), run(ids + 1, rows))
    except Exception as error:  # of the library: a layer that looks for what another one keeps
        raise ModelError(f"pp: {name} keeps something between its layers: {first_line(error)}") from None
    if not same:
        raise ModelError(f"pp: {name}: its layers read more than the rows of those before them")


class _PassEnd(Exception):
    """The rows behind a stage's last layer."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows


def _end_pass(_module: nn.Module, _inputs: object, output: Any) -> None:
    raise _PassEnd(output[0] if isinstance(output, tuple) else output)


class SkippedLayer(nn.Module):
    """In the place of a layer that another stage has."""

    def __init__(self, passing: PassOfStage) -> None:
        super().__init__()
        self._passing = passing

    def forward(self, *_: Any, **__: Any) -> Any:
        """The rows that the stage's own layers begin with."""
        rows = self._passing.rows
        assert rows is not None, "the stage has layers before it"
        return (rows, None) if self._passing.in_tuples else rows


class _Skipped(nn.Module):
    """In the place of a module with a weight."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.register_buffer("_dtype", own.weight.detach().new_empty(0), persistent=False)

    @property
    def weight(self) -> Tensor:
        """Empty, and in no checkpoint: some modules ask for its dtype, or fill it."""
        own: Tensor = self.get_buffer("_dtype")
        return own


class SkippedHead(_Skipped):
    """In the place of the last stage's head, where no pass comes to."""


class SkippedEmbedding(_Skipped):
    """In the place of the first stage's embedding: rows that tell tokens apart, which shows where they are read."""

    def __init__(self, own: nn.Embedding) -> None:
        super().__init__(own)
        self._width = own.embedding_dim

    def forward(self, ids: Tensor) -> Tensor:
        """ids [..., n] → [..., n, hidden], which CTRL scales in place."""
        return (ids + 1).to(self.weight.dtype).unsqueeze(-1).repeat_interleave(self._width, -1)


def strip_to_stage(model: nn.Module, stage: PipelineStage) -> PassOfStage:
    """Leaves in `model` what `stage` computes. Raises ModelError where it is not known which of its modules are its
    layers."""
    owner: Any = model
    passing, dropped = PassOfStage(), []
    path, layers = _layers_of(model)
    kept: list[nn.Module] = [
        layer if stage.first_layer <= number < stage.end_layer else SkippedLayer(passing)
        for number, layer in enumerate(layers)
    ]
    dropped += [f"{path}.{number}." for number, layer in enumerate(kept) if isinstance(layer, SkippedLayer)]
    if not stage.is_first:
        passing.first = kept[stage.first_layer]
    if not stage.is_last:
        passing.last = kept[stage.end_layer - 1]
    for number, layer in enumerate(kept):
        layers[number] = layer
    head, embedding = owner.get_output_embeddings(), owner.get_input_embeddings()
    tied = bool(owner.config.get_text_config(decoder=True).tie_word_embeddings)
    if not stage.is_first and not (tied and stage.is_last):
        if not isinstance(embedding, nn.Embedding):
            raise ModelError(f"pp: {type(model).__name__} has an embedding of its own kind, {type(embedding).__name__}")
        dropped.append(_replace(model, embedding, SkippedEmbedding(embedding)))
    if not stage.is_last and head is not None:
        dropped.append(_replace(model, head, SkippedHead(head)))
        owner.all_tied_weights_keys = {}  # the library would look for the head
    passing.dropped = tuple(dropped)
    return passing


def _layers_of(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """With their name: that of the library's plan, or else the only list of as many modules as there are layers."""
    owner: Any = model
    config = owner.config.get_text_config(decoder=True)
    lists = {
        name: each
        for name, each in model.named_modules()
        if isinstance(each, nn.ModuleList) and len(each) == config.num_hidden_layers
    }
    planned = [name.rpartition(".")[2] for name in getattr(config, "base_model_pp_plan", None) or ()]
    named = {name: each for name, each in lists.items() if name.rpartition(".")[2] in planned} or lists
    if len(named) != 1:
        found = ", ".join(named) or "none"
        raise ModelError(f"pp: it is not known which modules of {type(model).__name__} are its layers: {found}")
    return next(iter(named.items()))


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> str:
    """Returns the beginning of the names of its weights."""
    path = next(name for name, each in model.named_modules() if each is old)
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, new)
    return f"{path}."


def class_of_stage(kind: type[PreTrainedModel], stage: PipelineStage) -> type[PreTrainedModel]:
    """`kind`, of which the library makes and fills what `stage` computes only, with the weights of no other."""

    def build(self: Any, *settings: Any, **named: Any) -> None:
        kind.__init__(self, *settings, **named)
        self.baton_stage = strip_to_stage(self, stage)

    # Of the same name and module: the library looks things up by both.
    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})
