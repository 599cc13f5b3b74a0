"""Which folder a stack serves: a model's own, or one made for a shape whose weights are made up."""

from __future__ import annotations

import shutil
from pathlib import Path

from deploy.cli.errors import CommandError
from deploy.cli.stack_spec import DEMO_MODEL, model_directory
from services.worker.roofline.shapes import shape_file, shape_names

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def model_folder(model: str | None, load_format: str | None, run_dir: Path) -> Path:
    """Raises CommandError."""
    if load_format != "dummy":
        return model_directory(model)
    shape = None if model is None or Path(model).expanduser().is_dir() else shape_file(model)
    if shape is None and model is not None and "/" not in model and not Path(model).expanduser().is_dir():
        shapes = ", ".join(shape_names())
        raise CommandError(
            f"--model {model}: with --load-format dummy a directory, a Hugging Face id or one of {shapes}"
        )
    return model_directory(model, weights=False) if shape is None else _made(shape, run_dir)


def _made(shape: Path, run_dir: Path) -> Path:
    """With the demo model's tokenizer: its words are the first of the shape's vocabulary, and any will do."""
    folder = run_dir / "shapes" / shape.stem
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(shape, folder / "config.json")
    for name in _TOKENIZER:
        shutil.copyfile(DEMO_MODEL / name, folder / name)
    return folder.resolve()
