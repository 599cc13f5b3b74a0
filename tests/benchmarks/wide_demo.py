"""The demo model, several times as wide, and its drafters: `python -m tests.benchmarks.wide_demo FOLDER` for what
drafts gain where weights come from memory.

Every hidden unit, head and column of an MLP is there FACTOR times, and weights that read them are a FACTOR-th, so the
function is the demo model's (but for rounding), its text too, with FACTOR² times the weights. Drafters that read hidden
states read them all; EAGLE-3's layer and the draft model stay as small as they are.
"""

from __future__ import annotations

import argparse
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.paths import DEMO

FACTOR = 4
Tensors = dict[str, Tensor]


def _inside(weight: Tensor, factor: int) -> Tensor:
    """[out, in] of rows and to rows that are there `factor` times; of a norm [hidden]."""
    return weight.repeat(factor) if weight.ndim == 1 else weight.repeat(factor, factor) / factor


def _reads(weight: Tensor, factor: int) -> Tensor:
    """[out, in] of rows that are there `factor` times, to others."""
    return weight.repeat(1, factor) / factor


def wide_model(tensors: Tensors, factor: int) -> Tensors:
    """Embedding and head are no longer tied: one is there `factor` times, the other reads a `factor`-th."""
    embedding = tensors["model.embed_tokens.weight"]
    inner = {name: _inside(each, factor) for name, each in tensors.items() if "embed_tokens" not in name}
    return inner | {
        "model.embed_tokens.weight": embedding.repeat(1, factor),
        "lm_head.weight": _reads(embedding, factor),
    }


def wide_medusa(tensors: Tensors, factor: int) -> Tensors:
    return {name: (_inside if ".linear." in name else _reads)(each, factor) for name, each in tensors.items()}


def wide_eagle(tensors: Tensors, factor: int) -> Tensors:
    halves = tensors["fc.weight"].chunk(2, dim=1)
    inner = {name: _inside(each, factor) for name, each in tensors.items() if name != "fc.weight"}
    return inner | {"fc.weight": torch.cat([_inside(half, factor) for half in halves], dim=1)}


def wide_eagle3(tensors: Tensors, factor: int, embedding: Tensor) -> Tensors:
    """Only what reads the model's hidden states is wider."""
    taps = tensors["fc.weight"].chunk(3, dim=1)
    return tensors | {
        "fc.weight": torch.cat([_reads(tap, factor) for tap in taps], dim=1),
        "embed_tokens.weight": embedding,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--factor", type=int, default=FACTOR, help="a power of two, which bfloat16 divides by exactly")
    options = parser.parse_args()
    make(options.folder, options.factor)


SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def make(folder: Path, factor: int) -> None:
    """`model`, and beside it `medusa`, `eagle`, `eagle3` and `draft`."""
    embedding = load_file(DEMO / "model" / "model.safetensors")["model.embed_tokens.weight"]
    wide_target = {"target_hidden_size": factor * embedding.shape[1]}
    untied = {"tie_word_embeddings": False}
    for name, file, widen, sizes, changes in (
        ("model", "model.safetensors", wide_model, SIZES, untied),
        ("medusa", "medusa_lm_head.safetensors", wide_medusa, (), {}),
        ("eagle", "model.safetensors", wide_eagle, SIZES, untied),
        ("eagle3", "model.safetensors", partial(wide_eagle3, embedding=embedding), (), wide_target),
    ):
        shutil.copytree(DEMO / name, folder / name, dirs_exist_ok=True)
        tensors = widen(load_file(DEMO / name / file), factor)
        save_file(
            {key: each.contiguous() for key, each in tensors.items()}, folder / name / file, metadata={"format": "pt"}
        )
        own: dict[str, Any] = json.loads((DEMO / name / "config.json").read_text())
        grown = {size: factor * own[size] for size in sizes}
        (folder / name / "config.json").write_text(json.dumps(own | grown | changes, indent=2))
    shutil.copytree(DEMO / "draft", folder / "draft", dirs_exist_ok=True)


if __name__ == "__main__":
    main()
