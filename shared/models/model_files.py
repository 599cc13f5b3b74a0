"""Where a model's files lie: a directory as given, or the local snapshot of a Hugging Face repository."""

from __future__ import annotations

from pathlib import Path

from shared.machine.home import expanded
from shared.models.hub_download import HubModel, Say, fetched, hub_errors, listed

WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
EXPECTED = (
    "expected: a folder with config.json and safetensors, a .gguf file, or a repository such as Qwen/Qwen3-0.6B, "
    "Qwen/Qwen3-0.6B@REVISION or, of GGUF files, Qwen/Qwen3-0.6B-GGUF:Q8_0"
)


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
    folder = expanded(model)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"{folder}: no config.json there; a Hugging Face model directory is needed")
        return folder.resolve()
    if folder.is_file() and is_gguf(model):
        raise ModelNotFound(
            f"{folder}: a GGUF file; baton makes a directory of it where it takes --model, and so does "
            "python -m services.worker.models.gguf FILE FOLDER"
        )
    if is_gguf(model):
        raise ModelNotFound(f"{model}: no such file; {EXPECTED}")
    hub = HubModel.parse(model)
    _check_name(model, hub)
    if hub.quantization is not None:
        raise ModelNotFound(
            f"{model}: a GGUF file of the hub; baton fetches it and makes a directory of it where it takes --model"
        )
    return _download(model, hub, WANTED if weights else [p for p in WANTED if p != "*.safetensors"], say)


def hub_gguf(model: str, say: Say | None = None) -> Path | None:
    """The GGUF file of a repository that `model` names as OWNER/NAME:QUANTIZATION, fetched unless it is here; None for
    every other name. Raises ModelNotFound."""
    hub = HubModel.parse(model)
    if hub.quantization is None or expanded(model).exists():
        return None
    _check_name(model, hub)
    try:
        names = listed(hub)
    except hub_errors():  # without a network it may be here all the same
        folder = _download(model, hub, [f"*{end(hub.quantization)}.gguf" for end in (str.upper, str.lower)], say)
        names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    ending = hub.quantization.lower()
    found = [name for name in names if is_gguf(name) and Path(name).stem.lower().endswith(ending)]
    if not found:
        files = ", ".join(filter(is_gguf, names)) or "none"
        raise ModelNotFound(f"{model}: a file of one part that ends in {hub.quantization}.gguf is expected; {files}")
    # Of further kinds of the same name, such as UD-Q4_K_M beside Q4_K_M, the plain one.
    chosen = min(found, key=lambda name: (len(name), name))
    return _download(model, hub, [chosen], say) / chosen


def _check_name(model: str, hub: HubModel) -> None:
    """Raises ModelNotFound for what can only be meant as a path."""
    if model.startswith((".", "/", "~")) or hub.repository.count("/") > 1:
        raise ModelNotFound(f"{model}: no such directory; {EXPECTED}")


def _download(model: str, hub: HubModel, patterns: list[str], say: Say | None) -> Path:
    try:
        return fetched(hub, patterns, say)
    except hub_errors() as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ModelNotFound(
            f"{model}: not a directory here, and fetching it from the Hugging Face hub failed ({reason}); {EXPECTED}"
        ) from None
