"""Which folder a stack serves: a model's own, or one generated for a shape with dummy weights."""

from __future__ import annotations

import shutil
from pathlib import Path

from deploy.errors import CommandError
from services.worker.measure.roofline.wire import shape_file, shape_names
from shared.ids import ModelName
from shared.models.model_files import ModelNotFound, resolve_model

DEMO_MODEL = Path(__file__).with_name("demo") / "model"
DEMO_NAME = "baton-demo"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def model_directory(model: str | None, *, weights: bool = True) -> Path:
    """Fetches from the hub where needed, without the weights if they are not. Raises CommandError."""
    if model is not None and not model.strip():
        raise CommandError("--model is empty; a directory or a Hugging Face id is expected", status=2)
    if model is None and not (DEMO_MODEL / "config.json").is_file():
        raise CommandError(f"the demo model is not in {DEMO_MODEL}; name a model with --model")
    try:
        return resolve_model(model or str(DEMO_MODEL), weights=weights)
    except ModelNotFound as error:
        raise CommandError(str(error)) from None


def served_name(model: str | None, name: str | None) -> ModelName:
    """The model's name for clients: the given one, the hub's name, or the directory's."""
    if name:
        return ModelName(name)
    if model is None:
        return ModelName(DEMO_NAME)
    folder = Path(model).expanduser()
    return ModelName(folder.resolve().name if folder.is_dir() else model)


def model_folder(model: str | None, load_format: str | None, run_dir: Path) -> Path:
    """The directory that the services load the model from; with dummy weights one made in `run_dir` if needed. Raises
    CommandError."""
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
