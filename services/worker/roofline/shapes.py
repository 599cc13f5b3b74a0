"""The model shapes that are shipped with the measurements, as files of Hugging Face's keys. No torch."""

from __future__ import annotations

from pathlib import Path

SHAPES_FOLDER = Path(__file__).with_name("configs")


def shape_names() -> list[str]:
    return sorted(path.stem for path in SHAPES_FOLDER.glob("*.json"))


def shape_file(name: str) -> Path | None:
    """Where its configuration is; None where there is no such shape."""
    return SHAPES_FOLDER / f"{name}.json" if name in shape_names() else None
