"""What tells whether two hosts have the same model, in a second and without loading it."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from shared.packing import NOT_DECODED

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
SAMPLE_BYTES = 1024
MAX_HEADER_BYTES = 100_000_000
"""The format's own bound of a file's header."""
DIGEST_BYTES = 8
NOT_OF_THE_MODEL = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype"})
"""Keys of a config.json that say how a copy came to be, or as what it was saved."""


class ModelFingerprint(Struct, frozen=True):
    """Hex digests of a model's parts."""

    config: str
    tokenizer: str
    weights: str
    """Over each tensor's name, type, shape, first and last KiB: what was trained differs in nearly every element."""


def model_fingerprint(folder: Path, *, weights: bool) -> ModelFingerprint:
    """Reads a model directory. Without `weights` they are not looked at, as where they are made up. Raises OSError."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except NOT_DECODED as error:
        raise OSError(f"{folder / 'config.json'}: {error}") from None
    kept = {key: value for key, value in config.items() if key not in NOT_OF_THE_MODEL}
    tokenizer = blake2b(digest_size=DIGEST_BYTES)
    for name in TOKENIZER_FILES:
        path = folder / name
        tokenizer.update(name.encode() + (path.read_bytes() if path.is_file() else b""))
    samples: dict[str, bytes] = {}
    for path in sorted(folder.glob("*.safetensors")) if weights else ():
        samples |= _samples(path)
    return ModelFingerprint(
        config=_digest(msgspec.json.encode(kept, order="deterministic")),
        tokenizer=tokenizer.hexdigest(),
        weights=_digest(b"\0".join(name.encode() + b"\0" + samples[name] for name in sorted(samples))),
    )


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def _samples(path: Path) -> dict[str, bytes]:
    """Each tensor's type, shape, first and last KiB, by name. Raises OSError for a broken file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise OSError(f"{path}: no safetensors file")
        try:
            header: dict[str, Any] = msgspec.json.decode(file.read(length))
            header.pop("__metadata__", None)
            found = {}
            for name, entry in header.items():
                start, end = (8 + length + offset for offset in entry["data_offsets"])
                size = min(SAMPLE_BYTES, end - start)
                file.seek(start)
                first = file.read(size)
                file.seek(end - size)
                found[name] = f"{entry['dtype']}{entry['shape']}".encode() + first + file.read(size)
        except (*NOT_DECODED, KeyError, TypeError, ValueError, AttributeError) as error:
            raise OSError(f"{path}: no safetensors file ({error})") from None
    return found
