"""A manifest names a model by its bytes, and one that could do harm is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deploy.supervisor.checkpoints.manifest import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    BadManifest,
    CheckpointFile,
    CheckpointManifest,
    manifest_of,
    read_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(os.urandom(CHUNK_BYTES + 1))
    (made / "pytorch_model.bin").write_bytes(b"other")
    (made / ".hidden.json").write_bytes(b"other")
    return made


def test_a_manifest_has_the_models_files_and_what_is_in_them(folder: Path, tmp_path: Path) -> None:
    manifest = manifest_of(folder, tmp_path / "kept", weights=True)
    assert [(each.name, each.size, each.chunks) for each in manifest.files] == [
        ("config.json", 2, 1),
        ("model.safetensors", CHUNK_BYTES + 1, 2),
    ]
    assert [manifest.files[1].chunk_size(chunk) for chunk in range(2)] == [CHUNK_BYTES, 1]
    assert read_manifest(manifest.encoded()) == manifest
    without = manifest_of(folder, tmp_path / "other", weights=False)
    assert [each.name for each in without.files] == ["config.json"]


def test_an_unchanged_folder_is_not_read_again_and_a_changed_one_is(folder: Path, tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    before = manifest_of(folder, keep, weights=True)
    written = keep.stat().st_mtime_ns
    assert manifest_of(folder, keep, weights=True) == before
    assert keep.stat().st_mtime_ns == written
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes(8))
    assert manifest_of(folder, keep, weights=True).identity != before.identity
    keep.write_bytes(b"broken")
    assert manifest_of(folder, keep, weights=True).files[0] == before.files[0]


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (CheckpointFile("../config.json", 0, b""), "no name of a model's file"),
        (CheckpointFile(".config.json", 0, b""), "no name of a model's file"),
        (CheckpointFile("run.sh", 0, b""), "no name of a model's file"),
        (CheckpointFile("config.json", 5, b""), "0 bytes of digests for 5 bytes"),
        (CheckpointFile("config.json", -5, b""), "0 bytes of digests for -5 bytes"),
        (CheckpointFile("config.json", 5, bytes(2 * DIGEST_BYTES)), "64 bytes of digests for 5 bytes"),
    ],
)
def test_a_manifest_that_could_do_harm_is_refused(file: CheckpointFile, why: str) -> None:
    with pytest.raises(BadManifest, match=why):
        read_manifest(CheckpointManifest((file,)).encoded())


def test_what_is_no_manifest_is_refused() -> None:
    twice = (CheckpointFile("config.json", 0, b""),) * 2
    for data, why in (
        (b"<html>", "no manifest"),
        (CheckpointManifest(()).encoded(), "0 files"),
        (CheckpointManifest(twice).encoded(), "2 files, of 1 names"),
    ):
        with pytest.raises(BadManifest, match=why):
            read_manifest(data)
