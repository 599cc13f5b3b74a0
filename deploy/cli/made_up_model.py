"""Which folder a stack serves: a model's own, or one made for a shape whose weights are made up."""

from __future__ import annotations

import shutil
from pathlib import Path

from deploy.cli.stack_spec import DEMO_MODEL, model_directory
from services.worker.roofline.shapes import shape_file

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def model_folder(model: str | None, load_format: str | None, run_dir: Path) -> Path:
    """Raises CommandError."""
    if load_format != "dummy":
        return model_directory(model)
    shape = None if model is None or Path(model).expanduser().is_dir() else shape_file(model)
    return model_directory(model, weights=False) if shape is None else _made(shape, run_dir)


def _made(shape: Path, run_dir: Path) -> Path:
    """With the demo model's tokenizer: its words are the first of the shape's vocabulary, and any will do."""
    folder = run_dir / "shapes" / shape.stem
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(shape, folder / "config.json")
    for name in _TOKENIZER:
        shutil.copyfile(DEMO_MODEL / name, folder / name)
    return folder.resolve()
