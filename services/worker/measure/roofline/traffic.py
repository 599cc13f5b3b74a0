"""The bytes that a rank's step must move and the operations it must do, by its model's configuration. No device.

Bytes of a step of n rows (b: those of an element; G: of a key and a value of one token, in one layer):

    weights   b · (matrices of the rank's layers + head), experts of a mixture as far as rows go to them
    KV read   G · tokens seen by each sequence's rows, each once        (a prefill's own tokens are among them)
    written   G · n

What need not leave a chip is not counted: activations, norms and biases, embedding rows. Operations: 2 for each row and
element of a matrix, 4 · heads · head size for each pair of a query and a key it sees. Of the last layer only the rows
with logits go beyond attention.
"""

from __future__ import annotations

from msgspec import Struct

from services.worker.measure.roofline.wire import StepCase
from services.worker.models.config import LayerConfig, Mixture, ModelConfig
from services.worker.models.sharding import LayerShard


class StepWork(Struct, frozen=True):
    """What one step must move and compute."""

    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float
    flops: float


class ModelTraffic:
    """One rank's share of a model."""

    def __init__(self, config: ModelConfig, share: LayerShard, item_bytes: int, kv_token_bytes: float) -> None:
        """`kv_token_bytes`: of a key and a value of one token in one layer of this rank."""
        self._config = config
        self._share = share
        self._item = item_bytes
        self._kv_token = kv_token_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of all matrices, every expert included; a tied embedding counts once, as the head."""
        layers = sum(self._attention(True) + self._attention(False) + self._mlp(each, None) for each in self._layers)
        return self._item * (layers + self._head)

    def step(self, case: StepCase) -> StepWork:
        """Bytes and operations of one step of this rank."""
        rows = case.batch if case.kind == "decode" else case.batch * case.context
        seen, pairs, weights, flops = 0, 0, float(self._head), 2.0 * self._head * case.batch
        for number, layer in enumerate(self._layers):
            behind = case.batch if number == len(self._layers) - 1 else rows
            seen += case.batch * _seen(case, layer.window)
            pairs += case.batch * _pairs(case, layer.window)
            weights += self._attention(True) + self._attention(False) + self._mlp(layer, behind)
            flops += 2 * rows * self._attention(True)
            flops += 2 * behind * (self._attention(False) + self._mlp_of_a_row(layer))
        return StepWork(
            weight_bytes=self._item * weights,
            kv_read_bytes=self._kv_token * seen,
            kv_written_bytes=self._kv_token * rows * len(self._layers),
            flops=flops + 4 * self._share.num_heads * self._config.head_dim * pairs,
        )

    @property
    def _layers(self) -> tuple[LayerConfig, ...]:
        return self._config.layers

    @property
    def _head(self) -> int:
        return self._share.padded_vocab * self._config.hidden_size

    def _attention(self, inputs: bool) -> int:
        """Elements of the matrices before attention, or of that behind it."""
        heads = self._share.num_heads + (2 * self._share.num_kv_heads if inputs else 0)
        return self._config.hidden_size * self._config.head_dim * heads

    def _mlp(self, layer: LayerConfig, rows: int | None) -> float:
        """Elements that some rows together need; None: all of them."""
        mixture = self._config.mixture
        if mixture is None or not layer.mixes:
            return self._mlp_of_a_row(layer)
        experts = mixture.experts if rows is None else experts_met(mixture, rows)
        return self._router(mixture) + self._shared_expert() + experts * self._expert()

    def _mlp_of_a_row(self, layer: LayerConfig) -> int:
        """Elements that each row is multiplied with."""
        mixture = self._config.mixture
        if mixture is None or not layer.mixes:
            dense = 3 * self._config.hidden_size * _length(self._share.mlp) if layer.has_mlp else 0
            following = sum(each.parameters(self._config.hidden_size) for each in layer.following)
            return dense + following * self._share.num_heads // self._config.num_heads
        return self._router(mixture) + self._shared_expert() + mixture.chosen * self._expert()

    def _router(self, mixture: Mixture) -> int:
        return self._config.hidden_size * mixture.experts

    def _expert(self) -> int:
        return 3 * self._config.hidden_size * _length(self._share.experts)

    def _shared_expert(self) -> int:
        """With the gate that says how much of it is taken."""
        size = _length(self._share.shared_expert)
        return self._config.hidden_size * (3 * size + 1) if size else 0


def _length(part: tuple[int, int]) -> int:
    return part[1] - part[0]


def experts_met(mixture: Mixture, rows: int) -> float:
    """How many experts some rows go to together, were each row's choice any one as likely as another."""
    return float(mixture.experts * (1 - (1 - mixture.chosen / mixture.experts) ** rows))


def _seen(case: StepCase, window: int | None) -> int:
    """Tokens whose keys and values one sequence's rows read."""
    return case.context if window is None or case.kind == "prefill" else min(case.context, window)


def _pairs(case: StepCase, window: int | None) -> int:
    """Number of pairs of a query and a key, for one sequence."""
    if case.kind == "decode":
        return _seen(case, window)
    rows = case.context
    within = rows if window is None else min(rows, window)
    return within * (within + 1) // 2 + (rows - within) * within
