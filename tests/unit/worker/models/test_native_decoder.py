"""The native forward pass in one call against the same decoder by single operations, and bit for bit in every batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import Tensor

from services.worker.models.config import (
    ConvolutionConfig,
    DeltaConfig,
    ExpertLimits,
    LatentConfig,
    LayerConfig,
    LightningConfig,
    MambaConfig,
    Mixture,
    ModelConfig,
    ModelError,
    Multipliers,
    PositionSteps,
    ResidualScales,
    SelectiveConfig,
)
from services.worker.models.rope import PlainRope
from services.worker.models.weights import KvCaches, MixtureMlp
from services.worker.ops.interface import BatchMeta, InputRows, StateRows
from services.worker.ops.native.build import Level, runnable_levels
from services.worker.ops.quantized import SCHEMES, Scheme
from tests.support.worker.native_batches import Rows, meta_of, native, scattered_blocks
from tests.support.worker.seeded_decoders import seeded_decoder

LLAMA = ModelConfig(
    architecture="llama",
    dtype="float32",
    vocab_size=150,
    hidden_size=96,
    intermediate_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    layers=(LayerConfig(window=None, rope=PlainRope(10000.0)),) * 2,
    max_positions=512,
    norm_eps=1e-5,
    activation="silu",
    attention_scale=32**-0.5,
    attention_softcap=None,
    logits_softcap=None,
    qkv_bias=True,
    output_bias=False,
    mlp_bias=True,
    qk_norm=False,
    post_norms=False,
    norm_offset=False,
    embedding_scale=None,
    tied_embeddings=False,
    eos_token_ids=(),
)
GROWING = structs.replace(LLAMA, num_heads=6, head_dim=16, query_steps=PositionSteps(beta=0.3, length=24))
"""As Ministral 3's, of queries and keys that share a group of outputs."""
GEMMA = structs.replace(
    LLAMA,
    intermediate_size=80,
    layers=tuple(LayerConfig(window=window, rope=PlainRope(10000.0)) for window in (20, None, 40)),
    activation="gelu_tanh",
    attention_softcap=20.0,
    logits_softcap=10.0,
    qk_norm=True,
    post_norms=True,
    embedding_scale=9.8,
    mlp_bias=False,
)
"""Three windows, post norms, an MLP that cannot be gated on the way out of its product."""
SHARED = structs.replace(
    LLAMA,
    mlp_bias=False,
    layers=tuple(LayerConfig(window=None, rope=PlainRope(10000.0), mixes=mixes) for mixes in (True, False, True)),
    mixture=Mixture(experts=10, chosen=3, intermediate_size=64, renormalised=True, shared_size=80),
)
"""A dense layer among mixtures, whose shared expert has a gate."""
CORRECTED = structs.replace(
    SHARED,
    mixture=Mixture(
        experts=70,
        chosen=4,
        intermediate_size=48,
        renormalised=True,
        shared_size=64,
        shared_gated=False,
        scoring="sigmoid",
        corrected=True,
        exact_router=True,
        scale=2.5,
    ),
)
BIASED = structs.replace(
    SHARED,
    activation="swigluoai",
    mixture=Mixture(experts=4, chosen=2, intermediate_size=64, renormalised=False, biased=True),
    attention_sinks=True,
)
MIXTURES = (SHARED, CORRECTED, BIASED)


def _layers(states: str, mixes: str) -> tuple[LayerConfig, ...]:
    """A letter for each layer: `s` for one with states, `m` for one that mixes."""
    rope = PlainRope(10000.0)
    return tuple(
        LayerConfig(None, rope, mixes=mix == "m", has_state=each == "s")
        for each, mix in zip(states, mixes, strict=True)
    )


DELTA = structs.replace(
    SHARED,
    layers=_layers("ssa", "m-m"),
    qkv_bias=False,
    qk_norm=True,
    gated_attention=True,
    states=DeltaConfig(heads=6, head_dim=19, groups=2, state_dim=21, kernel=4),
)
"""As Qwen3.5's: gated attention behind delta nets, of sizes that fill no lanes; the last two numbers of each head are a
product of their own in the second layer."""
SPACES = structs.replace(
    LLAMA,
    mlp_bias=False,
    layers=_layers("sas", "---"),
    states=MambaConfig(heads=6, head_dim=16, groups=2, state_dim=12, kernel=4, conv_bias=True, bias=True),
    embedding_scale=3.0,
    residual_scale=0.3,
    logits_divisor=7.0,
)
"""As Granite 4's, whose outputs are scaled; the last layer's rows that are picked have states."""
MAMBA = structs.replace(SPACES, layers=_layers("ss", "--"), intermediate_size=0, residual_scale=None)
"""Layers without attention and without MLPs."""
CONVOLUTIONS = structs.replace(
    SPACES,
    layers=_layers("sas", "---"),
    states=ConvolutionConfig(heads=150, kernel=3, bias=True),
    residual_scale=None,
)
"""As LFM2's."""
CHANNELS = SelectiveConfig(
    heads=70, state_dim=12, kernel=4, step_rank=7, conv_bias=True, bias=False, norm_eps=1e-5, norm_weights=True
)
SELECTIVE = structs.replace(SHARED, layers=_layers("sas", "m--"), states=CHANNELS)
"""As Jamba's, of sizes that fill no lanes."""
MAMBA1 = structs.replace(
    MAMBA, layers=_layers("ss", "--"), states=structs.replace(CHANNELS, norm_eps=None), embedding_scale=None
)
BESIDE = structs.replace(
    SPACES,
    residual_scale=None,
    layers=tuple(
        LayerConfig(None, PlainRope(10000.0), has_state=not attends, beside=attends, has_mlp=attends)
        for attends in (False, True, False, True)
    ),
    multipliers=Multipliers(
        mixer_inputs=(0.9, 1.1, 0.8, 1.2, 0.7),
        mixer_output=0.6,
        attention_inputs=(1.1, 0.7, 1.3),
        attention_output=1.2,
        gate=0.8,
        down=1.3,
    ),
)
"""As Falcon-H1's: what mixer and attention give joins the residual together, of the last layer of picked rows."""
UNGATED = structs.replace(
    CORRECTED,
    activation="relu2",
    intermediate_size=72,
    layers=tuple(
        LayerConfig(None, PlainRope(10000.0), mixes=mixes, has_state=states, has_mlp=states)
        for states, mixes in ((True, False), (True, True), (False, False), (True, True))
    ),
    states=SPACES.states,
)
"""As Nemotron-H's."""
LIGHTNING = structs.replace(
    SHARED,
    layers=tuple(
        LayerConfig(
            *(None, PlainRope(10000.0)),
            mixes=mixes,
            has_state=states,
            residual=(ResidualScales(1.7, 0.9), ResidualScales(kept, 1.2)),
        )
        for states, mixes, kept in ((True, True, 1.3), (False, False, 1.0), (True, True, 0.8))
    ),
    mixture=Mixture(experts=6, chosen=2, intermediate_size=64, renormalised=True),
    states=LightningConfig(heads=5, head_dim=19, norm_eps=1e-6),
    residual_normed=True,
)
"""As MiniMax's, of heads that fill no lanes; a dense layer attends."""
WITH_STATES = (
    *(DELTA, SPACES, MAMBA, CONVOLUTIONS, SELECTIVE, MAMBA1, BESIDE, UNGATED, LIGHTNING),
    structs.replace(LIGHTNING, residual_normed=False),
)
LITE = structs.replace(
    CORRECTED,
    qkv_bias=False,
    num_kv_heads=1,
    head_dim=52,
    latent=LatentConfig(q_rank=None, kv_rank=40, nope_dim=20, rope_dim=12, value_dim=18, interleaved=False),
)
"""As DeepSeek-V2-Lite's, of sizes that fill no lanes."""
assert LITE.latent is not None
LATENTS = (LITE, structs.replace(LITE, latent=structs.replace(LITE.latent, q_rank=24), query_steps=GROWING.query_steps))
"""The second as Mistral Small 4's, whose queries are made of a latent, too, and grow with the position."""


class Steps:
    """Runs sequences of random tokens through a decoder, fused or by single operations."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        lengths: list[int],
        *,
        fused: bool,
        cache: torch.dtype | None = None,
        level: Level | None = None,
        scheme: Scheme | None = None,
    ) -> None:
        self.decoder = seeded_decoder(config, native(dtype, level=level, cache_dtype=cache), dtype, scheme)
        assert self.decoder._native is not None
        if not fused:
            self.decoder._native = None
        self.ids = [torch.arange(length, dtype=torch.int32) * 7 % config.vocab_size for length in lengths]
        self.blocks = scattered_blocks(lengths)
        self.caches: KvCaches = self.decoder.allocate_kv(sum(map(len, self.blocks)) + 1, len(lengths) + 2)

    def run(self, counts: dict[int, tuple[int, int]], first: int = 0) -> Tensor:
        """Logits of each sequence's last row, but for those before the sequence `first`."""
        meta = meta_of([Rows(end - begin, end, self.blocks[number]) for number, (begin, end) in counts.items()])
        logits = self._forward(counts, replace(meta, logits_rows=meta.logits_rows[first:]))
        assert logits is not None
        return logits.clone()

    def run_silently(self, counts: dict[int, tuple[int, int]]) -> None:
        """The same with no logits asked for."""
        meta = meta_of([Rows(end - first, end, self.blocks[number]) for number, (first, end) in counts.items()])
        assert self._forward(counts, replace(meta, logits_rows=meta.logits_rows[:0])) is None

    @property
    def picks(self) -> list[list[int]]:
        """How often each expert of each mixture was picked."""
        mixtures = [layer.mlp for layer in self.decoder.weights.layers if isinstance(layer.mlp, MixtureMlp)]
        return [each.counts.tolist() for each in mixtures if each.counts is not None]

    def _forward(self, counts: dict[int, tuple[int, int]], meta: BatchMeta) -> Tensor | None:
        ids = torch.cat([self.ids[number][first:end] for number, (first, end) in counts.items()])
        if self.decoder.state_bytes:
            meta = replace(meta, states=StateRows(torch.tensor([number + 2 for number in counts]), None))
        return self.decoder.forward(ids, meta, self.caches)


KIMI = structs.replace(
    LITE,
    layers=_layers("ssas", "m-mm"),
    states=DeltaConfig(heads=3, head_dim=19, groups=3, state_dim=19, kernel=4, gate_rank=19),
)
"""As Kimi-Linear's: delta nets by element beside latents, of sizes that fill no lanes."""
assert KIMI.latent is not None
LING = structs.replace(
    KIMI,
    layers=tuple(structs.replace(layer, limits=ExpertLimits(routed=0.4, shared=0.3)) for layer in KIMI.layers),
    latent=structs.replace(KIMI.latent, gates="heads"),
    states=DeltaConfig(heads=3, head_dim=19, groups=3, state_dim=19, kernel=4, element_rates=True, lower_bound=-5.0),
)
"""As Ling 3's: a row is projected to rates, which have a bound, heads of latent attention have gates, and gates and ups
of experts are limited."""

IDS = [
    *("delta", "spaces", "mamba", "convolutions", "selective", "mamba1", "beside", "ungated", "lightning"),
    *("lightning-before-norms", "lite", "latent-queries", "kimi", "ling"),
]

STEPS: tuple[dict[int, tuple[int, int]], ...] = (
    {0: (0, 30), 1: (0, 5), 2: (0, 64)},
    {0: (30, 31), 1: (5, 6), 2: (64, 100), 3: (0, 7)},
    {0: (31, 32), 1: (6, 7), 2: (100, 101), 3: (7, 8)},
)
LENGTHS = [32, 7, 101, 8]


@pytest.mark.parametrize(
    ("config", "dtype", "cache"),
    [
        (LLAMA, torch.float32, None),
        (LLAMA, torch.bfloat16, None),
        (LLAMA, torch.float16, None),
        (GROWING, torch.float32, None),
        (GROWING, torch.bfloat16, None),
        (structs.replace(GEMMA, logits_softcap=None), torch.float32, None),
        (LLAMA, torch.float32, torch.float8_e4m3fn),
        (LLAMA, torch.bfloat16, torch.float8_e4m3fn),
        (LLAMA, torch.bfloat16, torch.int8),
    ],
)
def test_one_call_equals_single_operations_bit_for_bit(
    config: ModelConfig, dtype: torch.dtype, cache: torch.dtype | None
) -> None:
    fused, single = (Steps(config, dtype, LENGTHS, fused=fused, cache=cache) for fused in (True, False))
    for counts in STEPS:
        assert torch.equal(fused.run(counts), single.run(counts))
        # As where a part of a prompt is computed beside others' last rows: the first sequence's logits are not wanted.
        assert torch.equal(fused.run(counts, first=1), single.run(counts, first=1))
    for mine, others in zip(fused.caches, single.caches, strict=True):
        assert all(torch.equal(*(half.view(torch.uint8) for half in pair)) for pair in zip(mine, others, strict=True))


@pytest.mark.parametrize("scheme", [None, "int4", "w8a8_int8"])
def test_some_rows_have_the_logits_that_they_have_among_all(scheme: Scheme | None) -> None:
    """As where log-probabilities of a prompt are wanted beside the last row of another; of weights of few bits, too."""
    steps = Steps(LLAMA, torch.bfloat16, LENGTHS, fused=True, scheme=scheme)
    meta = meta_of([Rows(end - begin, end, steps.blocks[number]) for number, (begin, end) in STEPS[0].items()])
    each = torch.arange(len(meta.positions), dtype=torch.int32)
    every = steps._forward(STEPS[0], replace(meta, logits_rows=each))
    assert every is not None
    every, some = every.clone(), each[[0, 1, 7, 29, 30, 34, 40, 98]]
    found = steps._forward(STEPS[0], replace(meta, logits_rows=some))
    assert found is not None
    assert torch.equal(found, every[some.long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_given_begin_as_by_single_operations_bit_for_bit(dtype: torch.dtype) -> None:
    """Multiplied in their own type, as Granite's are; what joins them behind the first layer is not."""
    config = structs.replace(LLAMA, embedding_scale=11.3, scales_inputs=True, input_levels=1)
    values = torch.sin(torch.arange(3 * 2 * config.hidden_size)).view(3, -1).to(dtype)
    given, found = InputRows(torch.tensor([1, 5, 31], dtype=torch.int32), values), list[Tensor]()
    for fused in (True, False):
        steps = Steps(config, dtype, LENGTHS, fused=fused)
        meta = meta_of([Rows(end - begin, end, steps.blocks[number]) for number, (begin, end) in STEPS[0].items()])
        logits = steps._forward(STEPS[0], replace(meta, inputs=given))
        assert logits is not None
        found.append(logits.clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("config", MIXTURES, ids=("shared", "corrected", "biased"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixtures_of_one_call_equal_those_of_single_operations(
    config: ModelConfig, dtype: torch.dtype, level: Level
) -> None:
    fused, single = (Steps(config, dtype, LENGTHS, fused=fused, level=level) for fused in (True, False))
    for counts in STEPS:
        assert torch.equal(fused.run(counts), single.run(counts))
        assert fused.picks == single.picks
    assert len(fused.picks) == 2
    assert all(map(sum, fused.picks))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts_of_few_bits_are_mixed_in_one_call(scheme: Scheme) -> None:
    fused, single = (Steps(SHARED, torch.bfloat16, LENGTHS, fused=fused, scheme=scheme) for fused in (True, False))
    for counts in STEPS:
        assert torch.equal(fused.run(counts), single.run(counts))


def test_gates_of_elements_of_latent_attention_are_left_to_single_operations() -> None:
    assert KIMI.latent is not None
    config = structs.replace(LING, latent=structs.replace(KIMI.latent, gates="elements"))
    assert seeded_decoder(LING, native(torch.float32), torch.float32).native is not None
    assert seeded_decoder(config, native(torch.float32), torch.float32).native is None


@pytest.mark.parametrize("level", runnable_levels())
@pytest.mark.parametrize("config", [*WITH_STATES, *LATENTS, KIMI, LING], ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_and_latents_of_one_call_equal_those_of_single_operations(
    config: ModelConfig, dtype: torch.dtype, level: Level
) -> None:
    fused, single = (Steps(config, dtype, LENGTHS, fused=fused, level=level) for fused in (True, False))
    for counts in STEPS:
        assert torch.equal(fused.run(counts), single.run(counts))
        for mine, others in zip(fused.caches, single.caches, strict=True):
            assert all(torch.equal(*pair) for pair in zip(mine, others, strict=True))


def test_logits_are_capped() -> None:
    fused, single = (Steps(GEMMA, torch.float32, LENGTHS, fused=fused) for fused in (True, False))
    for counts in STEPS:
        torch.testing.assert_close(fused.run(counts), single.run(counts), rtol=1e-5, atol=1e-5)


def test_with_post_norms_in_bf16_both_ways_are_near_float32() -> None:
    exact = Steps(GEMMA, torch.float32, LENGTHS, fused=True)
    fused, single = (Steps(GEMMA, torch.bfloat16, LENGTHS, fused=fused) for fused in (True, False))
    for counts in STEPS:
        logits = exact.run(counts)
        torch.testing.assert_close(fused.run(counts), logits, rtol=0.1, atol=0.3)
        torch.testing.assert_close(single.run(counts), logits, rtol=0.1, atol=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [LLAMA, GROWING, GEMMA, *MIXTURES, *WITH_STATES, *LATENTS, KIMI, LING])
def test_a_stream_alone_and_in_a_batch_has_the_same_logits_bit_for_bit(config: ModelConfig, dtype: torch.dtype) -> None:
    together = Steps(config, dtype, LENGTHS, fused=True)
    batches = [dict(zip(counts, together.run(counts), strict=True)) for counts in STEPS]
    for number, length in enumerate(LENGTHS):
        alone = Steps(config, dtype, LENGTHS, fused=True)
        alone.run_silently({number: (0, length - 1)})
        last = alone.run({number: (length - 1, length)})[0]
        assert torch.equal(last, batches[-1][number])


def test_rows_before_their_norm_are_not_kept_where_others_are_passed_on() -> None:
    decoder = seeded_decoder(LIGHTNING, native(torch.float32), torch.float32)
    with pytest.raises(ModelError, match="layers of this model pass normed rows on"):
        decoder.use_taps((0, 1, 2))


def test_an_id_outside_of_the_vocabulary_is_refused() -> None:
    steps = Steps(LLAMA, torch.float32, [4], fused=True)
    steps.ids[0][2] = LLAMA.vocab_size
    with pytest.raises(IndexError, match="vocabulary of 150"):
        steps.run({0: (0, 4)})
