"""How `baton bench roofline` and `baton bench kernels` are typed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from services.bench.options import checked, output_group, output_options, parse
from services.bench.report import OutputOptions, check_plot
from services.worker.measure.roofline.wire import KernelsRequest, StepsRequest, measured_shape_names
from shared.blocks import DEFAULT_BLOCK_SIZE, BlockSize
from shared.config import process_environment

DEMO = "demo"
FAMILIES = (
    "linears",
    "norms",
    "activation",
    "rotary",
    "decode-attention",
    "prefill-attention",
    "moe",
    "sampling",
    "masks",
    "verification",
    "kv-blocks",
)
_MOST = 1 << 20
"""Upper bound of sequences and tokens, beyond every device."""

_count = checked(int, lambda count: 1 <= count <= _MOST, f"a whole number from 1 to {_MOST}")
_seconds = checked(float, lambda seconds: 0.0 < seconds < 86_400.0, "a number of seconds above 0 and below a day")
_families = checked(
    lambda text: tuple(text.split(",")), lambda names: set(names) <= set(FAMILIES), f"a list of {', '.join(FAMILIES)}"
)


def roofline_options(argv: Sequence[str] | None) -> tuple[StepsRequest, OutputOptions, Path | None]:
    """What to measure, what becomes of the result, and where the roofline is drawn. A bad flag is explained, and ends
    the process with status 2. Raises BenchError where a plot could not be drawn."""
    parser = _parser("roofline", "A model's steps beside the limits of the device, measured in the same run.")
    parser.add_argument("--ops", choices=["auto", "torch", "native", "triton"], default="auto")
    parser.add_argument(
        "--batch", type=_numbers, metavar="N,N", help="Numbers of decoding sequences; none: no decodes."
    )
    parser.add_argument("--context", type=_numbers, metavar="N,N", help="Cached tokens of each decoding sequence.")
    parser.add_argument("--prefill", type=_numbers, metavar="N,N", help="Prompt lengths in tokens; none: no prompts.")
    parser.add_argument("--tp", type=_count, default=1, help="Ranks that share each layer; each is a GPU or a process.")
    parser.add_argument(
        "--block-size",
        type=int,
        choices=get_args(BlockSize),
        default=process_environment().get("BATON_BLOCK_SIZE", str(DEFAULT_BLOCK_SIZE)),
        help="Tokens of a block of KV cache, as of baton up; default: BATON_BLOCK_SIZE, or %(default)s.",
    )
    parser.add_argument("--enforce-eager", action="store_true", help="Do not capture decode steps in graphs.")
    parser.add_argument("--seconds", type=_seconds, default=120.0, help="Seconds for all measurements together.")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="Draw the roofline; also .svg and .pdf.")
    options = parse(parser, argv)
    check_plot(options.plot)
    name, shape, model = _model(parser, options)
    if model is None and shape is None:
        parser.error("name a --model or a --shape: baton bench has the demo model")
    request = StepsRequest(
        **_on_what(options),
        name=name or DEMO,
        shape=shape,
        model=model,
        ops=options.ops,
        batches=options.batch,
        contexts=options.context,
        prefills=options.prefill,
        tp=options.tp,
        enforce_eager=options.enforce_eager,
        block_size=options.block_size,
    )
    return request, output_options(options), options.plot


def kernels_options(argv: Sequence[str] | None) -> tuple[KernelsRequest, OutputOptions]:
    """What to measure, and what becomes of the result. A bad flag is explained, and ends the process with status 2."""
    parser = _parser("kernels", "Single kernels beside torch's own operations and the limits of the device.")
    parser.add_argument("--only", type=_families, default=(), metavar="NAME,NAME", help=", ".join(FAMILIES))
    parser.add_argument("--rows", type=_numbers, metavar="N,N", help="Numbers of rows (tokens) of a kernel.")
    parser.add_argument("--context", type=_numbers, metavar="N,N", help="Cached tokens of each sequence.")
    parser.add_argument("--seconds", type=_seconds, default=60.0, help="Seconds for all measurements together.")
    options = parse(parser, argv)
    name, shape, model = _model(parser, options)
    request = KernelsRequest(
        **_on_what(options),
        name=name,
        shape=shape,
        model=model,
        only=options.only,
        rows=options.rows,
        contexts=options.context,
    )
    return request, output_options(options)


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"baton bench {command}", description=description)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", metavar="DIR", help="Model folder; dummy weights if it has none.")
    parser.add_argument("--model-name", help=argparse.SUPPRESS)
    which.add_argument("--shape", choices=[DEMO, *measured_shape_names()], help="A shape, with dummy weights.")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8", "int8_per_token_head"], default="auto")
    parser.add_argument(
        "--attention", choices=["auto", "triton", "flash-attn"], default="auto", help="Attention kernels on a GPU."
    )
    parser.add_argument("--threads", type=_count, help="CPU threads; default: all.")
    parser.add_argument(
        "--cpu-time", action="store_true", help="Measure the process's CPU time, for a busy CPU; use --threads 1."
    )
    output_group(parser)
    return parser


def _on_what(options: argparse.Namespace) -> dict[str, Any]:
    """What both commands ask alike."""
    alike = ("device", "dtype", "threads", "cpu_time", "kv_cache_dtype", "attention", "seconds")
    return {name: getattr(options, name) for name in alike}


def _model(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[str | None, str | None, str | None]:
    """Its name, and either the shape or the folder; nothing where neither was given."""
    if options.model is not None:
        if not (Path(options.model) / "config.json").is_file():
            parser.error(f"--model {options.model}: no config.json is in it")
        return options.model_name or options.model, None, options.model
    if options.shape == DEMO:
        parser.error("--shape demo: it is baton bench that has the demo model")
    return options.shape, options.shape, None


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(map(_count, text.split(",")))
