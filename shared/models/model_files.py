"""Where a model's files lie: a directory as given, or the local snapshot of a Hugging Face repository."""

from __future__ import annotations

from pathlib import Path

from shared.models.hub_download import Say, fetched, hub_errors

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
EXPECTED = "expected: a folder with config.json and safetensors, a .gguf file, or a repository such as Qwen/Qwen3-0.6B"


class ModelNotFound(Exception):
    """Neither a directory with a config.json nor a repository that could be fetched; the text says what to do."""


def is_gguf(model: str) -> bool:
    """Whether `model` names a file of llama.cpp's."""
    return model.endswith(".gguf")


def resolve_model(model: str, *, weights: bool, say: Say | None = None) -> Path:
    """The directory of `model`, downloading it from the hub when it names a repository.

    `weights=False` fetches everything but the safetensors. `say` is told how much is fetched, and how long it took.
    Raises ModelNotFound.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"{folder}: no config.json there; a Hugging Face model directory is needed")
        return folder.resolve()
    if folder.is_file() and is_gguf(model):
        raise ModelNotFound(
            f"{folder}: a GGUF file; baton makes a directory of it where it takes --model, and so does "
            "python -m services.worker.models.gguf FILE FOLDER"
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelNotFound(f"{model}: no such directory; {EXPECTED}")
    if is_gguf(model):
        raise ModelNotFound(f"{model}: no such file; {EXPECTED}")
    return _download(model, WANTED if weights else [p for p in WANTED if p != "*.safetensors"], say)


def _download(repository: str, patterns: list[str], say: Say | None) -> Path:
    try:
        return fetched(repository, patterns, say)
    except hub_errors() as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelNotFound(
            f"{repository}: not a directory here, and fetching it from the Hugging Face hub failed ({reason}); "
            f"{EXPECTED}"
        ) from None
