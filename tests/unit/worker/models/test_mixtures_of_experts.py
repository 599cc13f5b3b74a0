"""Mixtures of experts: what configs say of them, how checkpoints lay them out, what they weigh and compute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from services.worker.backend import BackendError
from services.worker.models.checkpoint import TensorPart, TensorSource, model_digest, open_checkpoint
from services.worker.models.config import Mixture, ModelConfig, ModelError
from services.worker.models.dummy_weights import DummyTensors
from services.worker.models.expert_parallel.placement import spread_evenly
from services.worker.models.hf_config import read_model_config
from services.worker.models.loading import load_weights
from services.worker.models.mixture.expert_tensors import ExpertTensors
from services.worker.models.mixture.loading import read_experts
from services.worker.models.quantization.matrices import MatrixLoader
from services.worker.models.sharding import shard_of
from services.worker.ops.activation import Activation, LimitedActivation
from services.worker.ops.interface import Ops, OpsUnavailable, Routing, SupportsExpertMoves
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.quantized import Code, QuantizedStack, Scheme, WeightStack, quantize, stack_outputs
from services.worker.ops.torch_ops import TorchOps
from services.worker.ops.torch_routing import route
from services.worker.sim.shape import read_shape
from tests.support.models.config_files import active_parameters, assert_refused, read, write
from tests.support.models.expert_mixtures import MixedExperts, Shape
from tests.support.models.tiny_models import TinyModel, make_model

CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
QWEN3 = {**BASE, "architectures": ["Qwen3MoeForCausalLM"]}
QWEN2 = {**BASE, "architectures": ["Qwen2MoeForCausalLM"]}
MIXTRAL = {**BASE, "architectures": ["MixtralForCausalLM"]}


def mixing(config: ModelConfig) -> list[bool]:
    return [layer.mixes for layer in config.layers]


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    qwen3, qwen2, mixtral = (read(tmp_path, base) for base in (QWEN3, QWEN2, MIXTRAL))
    assert qwen3.mixture == Mixture(experts=128, chosen=8, intermediate_size=768, renormalised=False)
    assert qwen2.mixture == Mixture(experts=60, chosen=4, intermediate_size=1408, renormalised=False, shared_size=5632)
    assert mixtral.mixture == Mixture(experts=8, chosen=2, intermediate_size=96, renormalised=True)
    assert [mixing(config) for config in (qwen3, qwen2, mixtral)] == [[True] * 4] * 3
    assert (qwen3.qk_norm, qwen3.qkv_bias, qwen2.qkv_bias, mixtral.qkv_bias) == (True, False, True, False)
    assert (mixtral.norm_eps, mixtral.layers[0].rope.theta, qwen3.norm_eps) == (1e-5, 1_000_000.0, 1e-6)


def test_qwen_3_30b_a3b_is_read_in_both_spellings(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_window_layers": 48,
        "sliding_window": None,
    }
    old, new = read(tmp_path, QWEN3, **shape, num_experts=128), read(tmp_path, QWEN3, **shape, num_local_experts=128)
    assert old == new
    assert old.mixture == Mixture(experts=128, chosen=8, intermediate_size=768, renormalised=True)
    # The model card: 30.5 billion in total, 29.9 without embeddings, 3.3 activated (embeddings among them).
    table = 151936 * 2048
    assert round(old.parameters / 1e9, 1) == 30.5
    assert round((old.parameters - 2 * table) / 1e9, 1) == 29.9
    assert 3.3e9 < active_parameters(old) + table < 3.4e9


def test_layers_that_do_not_mix_are_told_by_number_and_by_step(tmp_path: Path) -> None:
    assert mixing(read(tmp_path, QWEN3, mlp_only_layers=[0, 2])) == [False, True, False, True]
    assert mixing(read(tmp_path, QWEN3, decoder_sparse_step=2)) == [False, True, False, True]
    assert mixing(read(tmp_path, QWEN2, decoder_sparse_step=2, mlp_only_layers=[3])) == [False, True, False, False]
    without = read(tmp_path, QWEN3, num_experts=0)
    assert (without.mixture, mixing(without)) == (None, [False] * 4)


@pytest.mark.parametrize(
    ("base", "changes", "complaint"),
    [
        (QWEN3, {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok 5: there are 4 experts"),
        (QWEN3, {"num_experts_per_tok": 0}, "num_experts_per_tok 0: there are 128 experts"),
        (QWEN3, {"num_experts": -1}, "num_experts -1 is not positive"),
        (QWEN3, {"moe_intermediate_size": 0}, "moe_intermediate_size 0 is not positive"),
        (QWEN3, {"decoder_sparse_step": 0}, "decoder_sparse_step 0 is not positive"),
        (QWEN2, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0 is not positive"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window true is not supported for Qwen3MoeForCausalLM"),
        (MIXTRAL, {"num_local_experts": 1}, "num_experts_per_tok 2: there are 1 experts"),
    ],
    ids=str,
)
def test_a_mixture_that_cannot_be_is_refused_by_key_and_value(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], complaint: str
) -> None:
    assert_refused(tmp_path, base, changes, complaint)


def test_experts_that_do_not_divide_over_ranks_are_named(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN2, moe_intermediate_size=20, shared_expert_intermediate_size=42)
    assert [shard_of(config, rank, 2).experts for rank in range(2)] == [(0, 10), (10, 20)]
    assert [shard_of(config, rank, 2).shared_expert for rank in range(2)] == [(0, 21), (21, 42)]
    with pytest.raises(ModelError, match="shared_expert_intermediate_size 42 does not divide over 4"):
        shard_of(config, 0, 4)
    with pytest.raises(ModelError, match="moe_intermediate_size 6 does not divide over 4"):
        shard_of(read(tmp_path, QWEN3, moe_intermediate_size=6), 0, 4)
    whole = shard_of(read(tmp_path, QWEN3, moe_intermediate_size=6), 1, 4, (spread_evenly(128, 4),))
    assert whole.experts == (0, 6)
    assert whole.placements[0].experts_of(whole.rank) == tuple(range(32, 64))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    return cache(lambda family: make_model(family, tmp_path_factory.mktemp(family)))


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_parameters_are_those_of_the_reference(tiny: Callable[[str], TinyModel], family: str) -> None:
    model = tiny(family)
    config = read_model_config(model.path)
    matrices = {name: weight for name, weight in model.reference.named_parameters() if weight.ndim > 1}
    assert config.parameters == sum(weight.numel() for weight in matrices.values())
    of_experts = sum(weight.numel() for name, weight in matrices.items() if "experts" in name)
    assert config.expert_share * config.parameters == pytest.approx(of_experts)


def test_the_simulation_reads_only_experts_that_are_chosen(tiny: Callable[[str], TinyModel]) -> None:
    for family in ("mixtral", "qwen2-moe", "qwen3-moe"):
        config, shape = read_model_config(tiny(family).path), read_shape(tiny(family).path, "float32")
        mixture = config.mixture
        assert mixture is not None
        assert shape.experts is not None
        routers = sum(mixing(config)) * (mixture.experts + (mixture.shared_size is not None)) * config.hidden_size
        head = config.vocab_size * config.hidden_size
        assert shape.weight_bytes == 4 * (config.parameters - routers)
        assert shape.flops_per_token == 2 * (round(active_parameters(config)) - routers - head)
        every, chosen = shape.experts.count, shape.experts.chosen
        assert shape.experts.idle_bytes(0) == every * shape.experts.bytes_each
        assert shape.experts.idle_bytes(1) == (every - chosen) * shape.experts.bytes_each
        moved = [shape.load(tokens=n, pairs=0, read=0, samples=0).bytes - shape.kv_bytes_per_token * n for n in (1, 99)]
        assert moved[0] == shape.weight_bytes - shape.experts.idle_bytes(1)
        assert moved[1] == pytest.approx(shape.weight_bytes)


def test_the_simulation_names_what_cannot_be(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {**QWEN3, "num_experts_per_tok": 500})
    with pytest.raises(BackendError, match=r"config\.json: num_experts_per_tok 500: there are 128 experts"):
        read_shape(folder, "auto")


def plain(tensors: TensorSource, code: Code | None = None) -> MatrixLoader:
    return MatrixLoader(tensors, TorchOps(CPU, torch.float32), CPU, code)


def numbers(stack: WeightStack) -> Tensor:
    if isinstance(stack, Tensor):
        return stack
    return torch.stack([each.dequantized(torch.float32) for each in stack.matrices])


@pytest.mark.parametrize("code", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_ranks_share_experts_that_were_rounded_as_a_whole(
    tiny: Callable[[str], TinyModel], family: str, code: Code
) -> None:
    """Downs of 16 columns a rank are no group of int4: they are the numbers of the codes."""
    config = read_model_config(tiny(family).path)
    mixture = config.mixture
    assert mixture is not None
    size = mixture.intermediate_size
    with open_checkpoint(tiny(family).path, torch.float32) as checkpoint:
        exact = read_experts(plain(checkpoint), "model.layers.0", mixture, 48, (0, size))
        whole, *halves = (
            read_experts(plain(checkpoint, code), "model.layers.0", mixture, 48, part)
            for part in ((0, size), (0, size // 2), (size // 2, size))
        )
    assert isinstance(whole.gate_up, QuantizedStack)
    assert isinstance(whole.down, QuantizedStack)
    for found, given in ((whole.gate_up, exact.gate_up), (whole.down, exact.down)):
        expected = torch.stack([quantize(each, code).dequantized(torch.float32) for each in given])
        assert torch.equal(numbers(found), expected)
    assert torch.equal(numbers(whole.down), torch.cat([numbers(half.down) for half in halves], dim=2))
    gates_and_ups = [numbers(half.gate_up).view(len(exact.router), 2, -1, 48) for half in halves]
    expected = torch.cat(gates_and_ups, dim=2).view(len(exact.router), -1, 48)
    assert torch.equal(numbers(whole.gate_up), expected)


@pytest.mark.parametrize(
    ("family", "block"), [("mixtral", "mlp"), ("qwen3-moe", "mlp"), ("granite-hybrid-moe", "block_sparse_moe")]
)
def test_both_layouts_of_checkpoints_give_the_same_weights(
    tiny: Callable[[str], TinyModel], tmp_path: Path, family: str, block: str
) -> None:
    """One tensor for each expert, as on the Hub, and one for all, as transformers 5 writes it when asked to."""
    model = tiny(family)
    model.reference.save_pretrained(tmp_path, save_original_format=False)
    config = read_model_config(tmp_path)
    mixture = config.mixture
    assert mixture is not None
    for rank in range(2):
        experts: list[ExpertTensors] = []
        for folder in (model.path, tmp_path):
            with open_checkpoint(folder, torch.float32) as checkpoint:
                assert (f"model.layers.0.{block}.experts.gate_up_proj" in checkpoint) == (folder == tmp_path)
                columns = shard_of(config, rank, 2).experts
                experts.append(read_experts(plain(checkpoint), "model.layers.0", mixture, 48, columns))
        assert experts[0].gate_up.shape == (mixture.experts, mixture.intermediate_size, 48)
        assert all(torch.equal(one, other) for one, other in zip(*(each[:3] for each in experts), strict=True))
    assert model_digest(tmp_path, config) != model_digest(model.path, config), "it samples tensors as they are there"


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16])
def test_tensors_read_together_lie_one_behind_the_other(tmp_path: Path, other: torch.dtype) -> None:
    a, b = torch.arange(12.0).view(4, 3), torch.arange(100.0, 110.0).view(2, 5)
    save_file({"a": a, "b": b.to(other)}, tmp_path / "model.safetensors")
    parts = [TensorPart("b", (2, 5), columns=(1, 3)), TensorPart("a", (4, 3), rows=(1, 3)), TensorPart("a", (4, 3))]
    with open_checkpoint(tmp_path, torch.float32) as checkpoint:
        expected = torch.cat((b[:, 1:3].flatten(), a[1:3].flatten(), a.flatten()))
        assert torch.equal(checkpoint.read_together(parts), expected)
        with pytest.raises(ModelError, match=r"tensor b has shape \[2, 5\], the config asks for \[2, 4\]"):
            checkpoint.read_together([parts[1], TensorPart("b", (2, 4))])


def test_made_up_experts_are_the_same_for_ranks_of_any_number(tmp_path: Path) -> None:
    mixture = Mixture(experts=3, chosen=1, intermediate_size=8, renormalised=True)
    made = DummyTensors(torch.float32, CPU)
    whole, *halves = (read_experts(plain(made), "l", mixture, 16, part) for part in ((0, 8), (0, 4), (4, 8)))
    assert torch.equal(whole.down, torch.cat([half.down for half in halves], dim=2))
    gates_and_ups = [half.gate_up.view(3, 2, 4, 16) for half in halves]
    assert torch.equal(whole.gate_up.view(3, 2, 8, 16), torch.cat(gates_and_ups, dim=2))


def test_a_checkpoint_without_an_expert_is_told_so(tiny: Callable[[str], TinyModel]) -> None:
    config = read_model_config(tiny("qwen3-moe").path)
    more = Mixture(experts=7, chosen=2, intermediate_size=32, renormalised=True)
    with open_checkpoint(tiny("qwen3-moe").path, torch.float32) as checkpoint:
        with pytest.raises(ModelError, match=r"mlp\.gate\.weight has shape \[6, 48\], the config asks for \[7, 48\]"):
            read_experts(plain(checkpoint), "model.layers.0", more, config.hidden_size, (0, 32))
        with pytest.raises(ModelError, match=r"no tensor model\.layers\.1\.mlp\.gate\.weight"):
            read_experts(plain(checkpoint), "model.layers.1", more, config.hidden_size, (0, 32))


class Mixed:
    """A mixture with random weights, and what it gives in float64."""

    def __init__(self, experts: int = 7, hidden: int = 48, size: int = 64, rows: int = 33) -> None:
        generator = torch.Generator().manual_seed(5)
        self.router = torch.randn(experts, hidden, generator=generator) / hidden**0.5
        self.gate_up = torch.randn(experts, 2 * size, hidden, generator=generator) / hidden**0.5
        self.down = torch.randn(experts, hidden, size, generator=generator) / size**0.5
        self.x = torch.randn(rows, hidden, generator=generator)
        self.codes: tuple[WeightStack, ...] = ()

    def rounded(self, code: Scheme) -> None:
        """From now on, weights are codes."""
        self.codes = tuple(_stacked(stack, code) for stack in (self.gate_up, self.down))
        self.gate_up, self.down = (numbers(stack) for stack in self.codes)

    def by(self, ops: Ops, x: Tensor, chosen: int, renormalised: bool) -> Tensor:
        logits = ops.linear(x, ops.pack_linear(self.router, None))
        packed = ops.pack_experts(*(self.codes or (self.gate_up, self.down)))
        picks = ops.choose_experts(logits, Routing(chosen, renormalised))
        return ops.mixture(x, picks, packed, kind="silu")

    def exactly(self, chosen: int, renormalised: bool) -> Tensor:
        x = self.x.double()
        chances, experts = (x @ self.router.double().T).softmax(dim=-1).topk(chosen, dim=-1)
        if renormalised:
            chances = chances / chances.sum(dim=-1, keepdim=True)
        gate, up = torch.einsum("nh,eih->nei", x, self.gate_up.double()).chunk(2, dim=-1)
        every = torch.einsum("nei,ehi->neh", F.silu(gate) * up, self.down.double())
        taken = every.gather(1, experts.unsqueeze(-1).expand(-1, -1, x.shape[1]))
        return (taken * chances.unsqueeze(-1)).sum(dim=1)


def _stacked(stack: Tensor, code: Scheme) -> QuantizedStack:
    together = stack_outputs([quantize(each, code) for each in stack])
    assert together is not None
    return QuantizedStack(together, len(stack))


def kinds_of_ops() -> list[Ops]:
    found: list[Ops] = [TorchOps(CPU, torch.float32)]
    with suppress(OpsUnavailable):
        found.append(NativeOps(CPU, torch.float32, threads=1))
    return found


@pytest.mark.parametrize(("chosen", "renormalised"), [(1, True), (2, False), (3, True), (7, False)])
@pytest.mark.parametrize("mixed", [Mixed(), Mixed(size=40), Mixed(rows=1100)], ids=["plain", "ragged", "many rows"])
def test_a_mixture_is_what_it_is_in_float64(mixed: Mixed, chosen: int, renormalised: bool) -> None:
    expected = mixed.exactly(chosen, renormalised)
    for ops in kinds_of_ops():
        found = mixed.by(ops, mixed.x, chosen, renormalised)
        assert found.sub(expected).abs().max() < 1e-5, ops.name


@pytest.mark.parametrize("code", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("size", [64, 96], ids=["gated on their way out", "gated behind"])
def test_a_mixture_of_codes_is_that_of_their_numbers(code: Code, size: int) -> None:
    mixed = Mixed(hidden=128, size=size, rows=40)
    mixed.rounded(code)
    expected = mixed.exactly(2, True)
    for ops in kinds_of_ops():
        assert mixed.by(ops, mixed.x, 2, True).sub(expected).abs().max() < 1e-5, ops.name


@pytest.mark.parametrize("code", [None, "int8"])
def test_experts_without_gates_are_what_they_are_in_float64_on_one_rank_and_on_two(code: Scheme | None) -> None:
    """As Nemotron-H has them; one rank has an expert that no row has picked."""
    mixed = MixedExperts(Shape(hidden=48, size=40, kind="relu2"), 20)
    mixed.logits[:, 4] = -100.0
    ups, downs = (stack if code is None else _stacked(stack, code) for stack in (mixed.gate_up, mixed.down))
    mixed.gate_up, mixed.down = numbers(ups), numbers(downs)
    for ops in kinds_of_ops():
        picks = ops.choose_experts(mixed.logits, Routing(2, True))
        mixed.check(ops.mixture(mixed.x, picks, ops.pack_experts(ups, downs), kind="relu2"))
        total = torch.zeros_like(mixed.x)
        for own in ([0, 3], [1, 2, 4]):
            numbered = torch.full((5,), -1).index_copy_(0, torch.tensor(own), torch.arange(len(own)))
            packed = ops.pack_experts(mixed.gate_up[own], mixed.down[own])
            total += ops.mixture(mixed.x, picks._replace(experts=numbered[picks.experts]), packed, kind="relu2")
        mixed.check(total)


@pytest.mark.parametrize(
    ("size", "code", "kind"),
    [
        *((64, None, "swigluoai"), (64, "int8", LimitedActivation("swiglustep", 0.4))),
        *((40, None, LimitedActivation("swiglustep", 0.4)), (40, "int8", "swigluoai")),
    ],
    ids=[
        "numbers, gated on their way out",
        "codes, gated on their way out",
        "numbers, gated behind",
        "codes, gated behind",
    ],
)
def test_biases_of_experts_and_clamped_gates_are_what_they_are_in_float64(
    size: int, code: Scheme | None, kind: Activation
) -> None:
    """As gpt-oss and Ling 3 have them; an expert on a rank with others' columns has no biases of its outputs."""
    mixed = MixedExperts(Shape(hidden=48, size=size, kind=kind, biased=True), 20)
    gate_up, down = (stack if code is None else _stacked(stack, code) for stack in (mixed.gate_up, mixed.down))
    mixed.gate_up, mixed.down = numbers(gate_up), numbers(down)
    biases, kinds = mixed.biases, kinds_of_ops()
    for ops in kinds:
        picks = ops.choose_experts(mixed.logits, Routing(2, True))
        mixed.check(ops.mixture(mixed.x, picks, ops.pack_experts(gate_up, down, biases), kind=kind))
        if isinstance(ops, SupportsExpertMoves):
            packer = ops.expert_packer()
            packed = packer.pack_experts(gate_up, down, biases)
            moved = packer.arrange_experts([(packed, number) for number in range(5)])
            mixed.check(ops.mixture(mixed.x, picks, moved, kind=kind))
    mixed.biases = biases._replace(down=None)
    for ops in kinds:
        picks = ops.choose_experts(mixed.logits, Routing(2, True))
        mixed.check(ops.mixture(mixed.x, picks, ops.pack_experts(gate_up, down, mixed.biases), kind=kind))


@pytest.mark.parametrize("size", [64, 40], ids=["gated on their way out", "gated behind"])
def test_a_mixture_rounds_what_its_experts_multiply(size: int) -> None:
    """Rows, and what is between an expert's two products, as its linear layers alone do."""
    mixed = Mixed(size=size, rows=40)
    mixed.rounded("w8a8_int8")
    for ops in kinds_of_ops():
        expected = torch.zeros(mixed.x.shape)
        picks = ops.choose_experts(ops.linear(mixed.x, ops.pack_linear(mixed.router, None)), Routing(2, True))
        gate_up, down = (stack.matrices for stack in mixed.codes if isinstance(stack, QuantizedStack))
        for expert, (first, second) in enumerate(zip(gate_up, down, strict=True)):
            gated = ops.gated_act(ops.linear(mixed.x, ops.pack_quantized(first, None)), "silu")
            chances = (picks.chances * (picks.experts == expert)).sum(dim=1, keepdim=True)
            expected += chances * ops.linear(gated, ops.pack_quantized(second, None))
        assert mixed.by(ops, mixed.x, 2, True).sub(expected).abs().max() < 1e-5, ops.name
        assert expected.sub(mixed.exactly(2, True)).abs().max() > 1e-3, "weights alone would agree, too"


@pytest.mark.parametrize("size", [64, 40], ids=["gated on their way out", "gated behind"])
def test_picks_of_other_ranks_are_left_out(size: int) -> None:
    """The first of a row's two picks here and the second there give the same together as both; rows without any give
    zeros, and so does a step without any."""
    mixed = Mixed(size=size, rows=600)
    for ops in kinds_of_ops():
        packed = ops.pack_experts(mixed.gate_up, mixed.down)
        picks = ops.choose_experts(ops.linear(mixed.x, ops.pack_linear(mixed.router, None)), Routing(2, True))
        here = torch.arange(2).expand(len(mixed.x), 2) == (torch.arange(len(mixed.x)) % 2).unsqueeze(1)
        here[:512] &= torch.arange(512).unsqueeze(1) >= 3
        parts = [
            ops.mixture(mixed.x, picks._replace(experts=picks.experts.masked_fill(out, -1)), packed, kind="silu")
            for out in (here, ~here, torch.ones_like(here))
        ]
        assert not parts[2].any()
        assert not parts[1][:3].any()
        expected = mixed.exactly(2, True)
        assert (parts[0] + parts[1]).sub(expected).abs().max() < 1e-5, ops.name


@pytest.mark.parametrize("code", [None, "int8", "int4"])
@pytest.mark.parametrize("size", [40, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_native_operations_does_not_depend_on_the_others(
    dtype: torch.dtype, size: int, code: Code | None
) -> None:
    try:
        ops = NativeOps(CPU, dtype, threads=2)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    mixed = Mixed(size=size, rows=600)
    if code is not None:
        mixed.rounded(code)
    x = mixed.x.to(dtype)
    together = mixed.by(ops, x, 3, True)
    for row in (0, 7, 32, 599):
        assert torch.equal(mixed.by(ops, x[row : row + 1], 3, True)[0], together[row])


def test_chances_are_those_of_all_experts_unless_they_are_scaled() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0]])
    chances, experts = route(logits, Routing(2, False))
    assert experts.tolist() == [[0, 2]]
    assert torch.allclose(chances, logits.softmax(-1)[:, [0, 2]])
    assert torch.allclose(route(logits, Routing(2, True))[0], torch.tensor([[2.0, 1.0]]).softmax(-1))


@pytest.mark.parametrize(
    "routing",
    [
        Routing(3, True),
        Routing(8, False),
        Routing(2, True, scoring="sigmoid", bias=torch.linspace(0.3, -0.3, 40), scale=2.5),
        Routing(4, False, groups=5, chosen_groups=2),
        Routing(5, True, "sigmoid", groups=8, chosen_groups=3, bias=torch.linspace(-2, 2, 40).sin(), scale=2.5),
    ],
    ids=["scaled", "plain", "corrected", "grouped", "corrected groups"],
)
def test_the_library_chooses_what_torch_does(routing: Routing) -> None:
    try:
        ops = NativeOps(CPU, torch.bfloat16, threads=2)
    except OpsUnavailable as reason:
        pytest.skip(str(reason))
    logits = torch.randn(100, 40, generator=torch.Generator().manual_seed(3)) * 3
    found, expected = ops.choose_experts(logits, routing), route(logits, routing)
    assert torch.equal(found.experts, expected.experts)
    assert torch.allclose(found.chances, expected.chances, rtol=1e-5, atol=1e-7)
    assert torch.equal(ops.choose_experts(logits[7:8], routing).chances[0], found.chances[7])
    for same in (0.0, float("nan")):
        assert ops.choose_experts(torch.full((1, 40), same), Routing(3, True)).experts.tolist() == [[0, 1, 2]]


def test_a_stage_loads_the_layers_that_it_has(tiny: Callable[[str], TinyModel]) -> None:
    """Layer 1 of this model is dense, the others mix."""
    config = read_model_config(tiny("qwen3-moe").path)
    with open_checkpoint(tiny("qwen3-moe").path, torch.float32) as checkpoint:
        weights = load_weights(checkpoint, config, shard_of(config, 0, 1), TorchOps(CPU, torch.float32), CPU, 64)
    assert [type(layer.mlp).__name__ for layer in weights.layers] == ["MixtureMlp", "DenseMlp", "MixtureMlp"]
