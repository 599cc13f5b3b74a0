"""A model's folder whose weights can be broken, while the model itself stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.chaos.model_copy import KEPT_BYTES, ModelCopy

WEIGHTS = bytes(range(256)) * 64


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)
    return folder


def test_weights_are_broken_in_the_copy_alone_and_repaired(model: Path, tmp_path: Path) -> None:
    copy = ModelCopy(model, tmp_path / "copies" / "model")
    weights = copy.folder / "model.safetensors"
    assert (weights.read_bytes(), (copy.folder / "config.json").read_text()) == (WEIGHTS, "{}")
    for _ in range(2):
        copy.damage("missing")
        assert not weights.exists()
        copy.repair()
        copy.damage("truncated")
        assert weights.read_bytes() == WEIGHTS[:KEPT_BYTES]
        copy.repair()
        assert weights.read_bytes() == WEIGHTS
    assert (model / "model.safetensors").read_bytes() == WEIGHTS


def test_who_has_the_weights_open_keeps_them(model: Path, tmp_path: Path) -> None:
    copy = ModelCopy(model, tmp_path / "copy")
    with (copy.folder / "model.safetensors").open("rb") as opened:
        copy.damage("truncated")
        assert opened.read() == WEIGHTS
