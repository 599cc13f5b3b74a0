"""Products in tiles (AMX): against float64, against those of other instructions, and the same in every batch.

The library's own tile instructions are emulated where a processor has none (tests/support/tiles), as CI's: there this
is about the kernels' code and not about a processor's.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.worker.ops.interface import OpsUnavailable, Routing
from services.worker.ops.native import build, native_ops, tile_check
from services.worker.ops.native.build import best_level, library_path
from services.worker.ops.native.native_ops import NativeOps
from services.worker.ops.quantized import GROUP_SIZES, Code, QuantizedWeight, Scheme, quantize
from services.worker.ops.selector import OpsChoice, create_ops
from tests.support.tiles.emulated_tiles import Count, tile_instructions
from tests.support.worker.native_batches import CPU, random

SHAPES = ((64, 64), (128, 1024), (100, 80), (33, 31), (1, 2), (192, 1058), (17, 517))
"""(outputs, inputs): whole tiles and ragged ones, one pass and several, odd numbers of inputs, rows that are copied."""
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 49, 70, 97)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Count | None]:
    with tile_instructions(tmp_path_factory.mktemp("tiles")) as count:
        yield count


@pytest.fixture(scope="module")
def tiled(emulated: Count | None) -> NativeOps:
    return NativeOps(CPU, torch.bfloat16, threads=2, level="amx")


@pytest.fixture(scope="module")
def plain() -> NativeOps:
    return NativeOps(CPU, torch.bfloat16, threads=2, level="avx512-bf16")


def check(ops: NativeOps, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Every row beside float64, and some of them alone."""
    packed = ops.pack_linear(weight, bias)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    found = ops.linear(x, packed)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * x.shape[1] ** 0.5)
    for row in {0, len(x) // 2, len(x) - 1}:
        assert torch.equal(ops.linear(x[row : row + 1], packed), found[row : row + 1])


@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_bfloat16_equals_float64_for_any_number_of_rows(tiled: NativeOps, out: int, inputs: int) -> None:
    weight, bias = random(out, inputs, seed=1, dtype=torch.bfloat16), random(out, seed=2)
    for rows in ROWS:
        check(tiled, random(rows, inputs, seed=rows, dtype=torch.bfloat16), weight, bias if rows % 2 else None)


def test_blocks_of_rows_take_turns_with_the_weights(tiled: NativeOps) -> None:
    """Four of 75 rows, three of which fit into half of the second-level cache."""
    x, weight = random(300, 2112, dtype=torch.bfloat16), random(130, 2112, seed=1, dtype=torch.bfloat16)
    check(tiled, x, weight, None)


def test_rows_of_float32_are_rounded(tiled: NativeOps) -> None:
    packed, x = tiled.pack_linear(random(64, 96, seed=1), None), random(40, 96)
    assert torch.equal(tiled.linear(x, packed), tiled.linear(x.bfloat16(), packed))


def test_a_row_is_the_same_among_any_number_of_rows(tiled: NativeOps) -> None:
    packed, x = tiled.pack_linear(random(80, 96, seed=1), None), random(70, 96, dtype=torch.bfloat16)
    whole = tiled.linear(x, packed)
    for rows in range(1, 71):
        assert torch.equal(tiled.linear(x[:rows], packed), whole[:rows])
        assert torch.equal(tiled.linear(x[-rows:], packed), whole[-rows:])


def test_sums_are_in_the_order_of_intels_manual(tiled: NativeOps) -> None:
    """TDPBF16PS: 16 pairs at a time, first and second numbers apart. Products of bfloat16 are exact in float32."""
    x, weight = (random(rows, 1024, seed=rows, dtype=torch.bfloat16) for rows in (5, 48))
    expected = torch.zeros(5, 48)
    for tile in range(0, 1024, 32):
        sums = [torch.zeros(5, 48) for _ in range(2)]
        for i in range(tile, tile + 32):
            sums[i % 2] += x[:, i : i + 1].float() * weight[:, i].float()
        expected += sums[0] + sums[1]
    assert torch.equal(tiled.linear(x, tiled.pack_linear(weight, None)), expected)


def test_the_probe_of_tiles_does_what_it_counts(tiled: NativeOps, emulated: Count | None) -> None:
    before, operations = emulated() if emulated else 0, tiled.kernels.library.baton_probe_tiles(tiled.kernels.pool, 80)
    assert operations % (16 * 16 * 32 * 2) == 0
    assert emulated is None or emulated() - before == operations // (16 * 16 * 32 * 2) > 0


def test_what_is_no_number_stays_in_its_row(tiled: NativeOps) -> None:
    x = random(33, 72, dtype=torch.bfloat16)
    x[4, 71], x[20, 0] = float("nan"), float("inf")
    found = tiled.linear(x, tiled.pack_linear(random(16, 72, seed=1).abs() + 1, None))
    assert (~found.isfinite().all(dim=1)).nonzero().flatten().tolist() == [4, 20]


@pytest.mark.parametrize("scheme", ["int8", "w8a8_int8"])
def test_int8_has_the_bits_of_vnni(tiled: NativeOps, plain: NativeOps, scheme: Scheme, emulated: Count | None) -> None:
    before = emulated() if emulated else 0
    for out, inputs in SHAPES:
        weight, bias = quantize(random(out, inputs, seed=1), scheme), random(out, seed=2)
        in_tiles, otherwise = (ops.pack_quantized(weight, bias) for ops in (tiled, plain))
        for rows in ROWS:
            x = random(rows, inputs, seed=rows, dtype=torch.bfloat16)
            assert torch.equal(tiled.linear(x, in_tiles), plain.linear(x, otherwise)), (out, inputs, rows)
    assert emulated is None or emulated() > before


@pytest.mark.parametrize("code", ["int4", "int8"])
def test_groups_of_inputs_have_the_bits_of_vnni(
    tiled: NativeOps, plain: NativeOps, code: Code, emulated: Count | None
) -> None:
    """Of each size; with zero points and offsets, the codes furthest from 0, and elements that two digits just hold."""
    before = emulated() if emulated else 0
    for group in GROUP_SIZES:
        codes = torch.randint(0, 16 if code == "int4" else 256, (100, 1024), dtype=torch.uint8)
        codes[7] = 0 if code == "int4" else 128
        scales, offsets = random(100, 1024 // group, seed=3).abs(), random(100, 1024 // group, seed=4)
        points = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if code == "int4" else None
        for weight in (
            QuantizedWeight(code, codes, scales, points),
            QuantizedWeight(code, codes, scales, None, offsets),
        ):
            in_tiles, otherwise = (ops.pack_quantized(weight, None) for ops in (tiled, plain))
            for rows in (1, 3, 4, 16, 17, 49):
                x = random(rows, 1024, seed=rows, dtype=torch.bfloat16)
                x[0] = 1.0
                assert torch.equal(tiled.linear(x, in_tiles), plain.linear(x, otherwise)), (group, rows)
    assert emulated is None or emulated() > before


def test_fp8_is_multiplied_as_without_tiles(tiled: NativeOps, plain: NativeOps) -> None:
    weight, x = quantize(random(64, 128, seed=1), "fp8"), random(40, 128, dtype=torch.bfloat16)
    assert torch.equal(*(ops.linear(x, ops.pack_quantized(weight, None)) for ops in (tiled, plain)))


def test_experts_are_multiplied_in_tiles_of_their_own_rows(tiled: NativeOps, plain: NativeOps) -> None:
    """Gates and ups, activated on their way out."""
    stacks = [random(8, *shape, seed=2) / 8 for shape in ((256, 64), (64, 128))]
    x, logits = random(60, 64, dtype=torch.bfloat16), random(60, 8, seed=3)

    def mixed(ops: NativeOps, rows: slice) -> Tensor:
        picks = ops.choose_experts(logits[rows], Routing(2, renormalised=True))
        return ops.mixture(x[rows], picks, ops.pack_experts(*stacks), kind="silu")

    found = mixed(tiled, slice(None))
    torch.testing.assert_close(found, mixed(plain, slice(None)), rtol=0.02, atol=0.01)
    for row in (0, 31, 59):
        assert torch.equal(mixed(tiled, slice(row, row + 1)), found[row : row + 1])


def test_a_processor_with_tiles_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    xeon = dict(build._NEEDED)["amx"]
    monkeypatch.setattr(build, "_cpu_flags", lambda: xeon)
    assert build.runnable_levels()[:2] == ("amx", "avx512-bf16")
    assert library_path("amx") == library_path("avx512-bf16")
    monkeypatch.setattr(build, "_cpu_flags", lambda: xeon - {"amx_int8"})
    assert best_level() == "avx512-bf16"


def test_without_the_systems_leave_nothing_is_multiplied_in_tiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, emulated: Count | None
) -> None:
    monkeypatch.setattr(tile_check, "allow_tiles", lambda loaded: False)
    _check_left_alone(monkeypatch, caplog, "keeps no tiles for this process")


def test_tiles_that_give_something_else_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, emulated: Count | None
) -> None:
    right = tile_check._Trial.multiply

    def wrong(self: tile_check._Trial, *args: object, tiled: bool) -> Tensor:
        return right(self, *args, tiled=tiled) + 0.01 * tiled  # type: ignore[arg-type]

    monkeypatch.setattr(tile_check._Trial, "multiply", wrong)
    _check_left_alone(monkeypatch, caplog, "other results than by AVX-512 in bfloat16, int8, int4")


def _check_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    tile_check.tiles_work.cache_clear()
    monkeypatch.setattr(native_ops, "best_level", lambda: "amx")
    try:
        with caplog.at_level(logging.WARNING):
            ops = [NativeOps(CPU, torch.bfloat16, threads=1) for _ in range(2)]
        assert [each.kernels.instructions for each in ops] == ["avx512-bf16"] * 2
        assert not ops[0].pack_matrix(random(16, 16), None).linear.tiled
        (warned,) = caplog.messages
        assert reason in warned
        with pytest.raises(OpsUnavailable, match="instructions = amx: they cannot be used here"):
            NativeOps(CPU, torch.bfloat16, threads=1, level="amx")
    finally:
        tile_check.tiles_work.cache_clear()


def test_instructions_that_cannot_be_had_are_refused() -> None:
    for ops, instructions, reason in (
        ("auto", "neon", "this machine has"),
        ("torch", "avx2", "only native operations"),
    ):
        if instructions in build.runnable_levels() and ops == "auto":
            continue
        with pytest.raises(OpsUnavailable, match=f"instructions = {instructions}: {reason}"):
            create_ops(OpsChoice(ops, CPU, torch.bfloat16, instructions=instructions), best="native")  # type: ignore[arg-type]


@pytest.mark.parametrize(("kernel", "loads"), [("multiply_wide", 5), ("multiply_square", 4)])
def test_inner_loops_load_and_multiply_and_nothing_is_spilled(kernel: str, loads: int, plain: NativeOps) -> None:
    """Of bf16 and of bytes; twice each, as the last steps have a tile of their own."""
    bodies = _disassembled(library_path("avx512-bf16"), kernel)
    assert sorted(next(name for name in ("tdpbf16ps", "tdpbsud") if name in body) for body in bodies) == [
        "tdpbf16ps",
        "tdpbsud",
    ]
    for body in bodies:
        assert body.count("tileloadd") == 2 * loads
        assert body.count("\ttdp") == 8
        assert "tilestored" not in body
        assert "(%rsp" not in body.split("tileloadd", 1)[1].rsplit("\ttdp", 1)[0]


def _disassembled(path: Path, function: str) -> list[str]:
    """Each instance of a function template."""
    symbols = _output("nm", "-S", "-C", str(path)).splitlines()
    found = [line.split()[:2] for line in symbols if f"::{function}<" in line]
    return [
        _output(
            "objdump",
            "-d",
            "--no-show-raw-insn",
            f"--start-address=0x{at}",
            f"--stop-address={_end(at, size)}",
            str(path),
        )
        for at, size in found
    ]


def _end(at: str, size: str) -> str:
    return hex(int(at, 16) + int(size, 16))


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
