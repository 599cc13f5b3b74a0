"""Which folder a stack serves: a model's own, or one generated for a shape with dummy weights, or one that has another
tokenizer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from hashlib import blake2b
from pathlib import Path

from deploy.errors import CommandError
from services.worker.measure.roofline.wire import shape_file, shape_names
from shared.config import cache_folder
from shared.ids import ModelName
from shared.machine.home import expanded
from shared.models.gguf_header import GgufError, check_gguf
from shared.models.hub_download import HubModel
from shared.models.model_files import ModelNotFound, hub_gguf, is_gguf, resolve_model

DEMO_MODEL = Path(__file__).with_name("demo") / "model"
DEMO_NAME = "baton-demo"
_CONVERSION = 3
"""Raised with any change to what is made of a GGUF file."""
_BESIDE_TOKENIZER = ("tokenizer_config.json", "chat_template.jinja")
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "chat_template*"),
    *("spiece.model", "sentencepiece*"),
)
"""What belongs to a tokenizer, its chat template included."""


def model_directory(model: str | None, *, weights: bool = True) -> Path:
    """Fetches from the hub where needed, without the weights if they are not. Raises CommandError."""
    if model is not None and not model.strip():
        raise CommandError("--model is empty; a directory or a Hugging Face id is expected", status=2)
    if model is None and not (DEMO_MODEL / "config.json").is_file():
        raise CommandError(f"the demo model is not in {DEMO_MODEL}; name a model with --model")
    if model is not None and is_gguf(model) and expanded(model).is_file():
        return _converted(expanded(model).resolve())
    try:
        if model is not None and (file := hub_gguf(model, _say)) is not None:
            return _converted(file)
        return resolve_model(model or str(DEMO_MODEL), weights=weights, say=_say)
    except ModelNotFound as error:
        raise CommandError(f"--model {error}") from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def served_name(model: str | None, name: str | None) -> ModelName:
    """The model's name for clients: the given one, the hub's without a revision, or the directory's."""
    if name:
        return ModelName(name)
    if model is None:
        return ModelName(DEMO_NAME)
    folder = expanded(model)
    if folder.is_file() and is_gguf(model):
        return ModelName(folder.stem)
    if folder.is_dir():
        return ModelName(folder.resolve().name)
    hub = HubModel.parse(model)
    return ModelName(hub.repository if hub.quantization is None else f"{hub.repository}:{hub.quantization}")


def _converted(file: Path) -> Path:
    """The model directory made of a GGUF file, in the user's cache; made once for each state of the file. Raises
    CommandError."""
    stat = file.stat()
    state = f"{_CONVERSION} {file} {stat.st_size} {stat.st_mtime_ns}"
    try:
        cache = cache_folder("gguf")
    except OSError as error:
        raise CommandError(f"{error} or XDG_CACHE_HOME") from None
    folder = cache / f"{file.stem}-{blake2b(state.encode(), digest_size=8).hexdigest()}"
    if not folder.is_dir():
        try:
            check_gguf(file)
        except (GgufError, OSError) as error:
            raise CommandError(str(error)) from None
        # In a process of its own: here, nothing imports torch.
        command = [sys.executable, "-m", "services.worker.models.gguf", str(file), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CommandError((done.stderr.strip().splitlines() or ["the conversion was killed"])[-1])
        if done.stdout:
            _say(done.stdout.strip())
    return folder


def model_folder(model: str | None, load_format: str | None, run_dir: Path) -> Path:
    """The directory that the services load the model from; with dummy weights one made in `run_dir` if needed. Raises
    CommandError."""
    if load_format != "dummy":
        return model_directory(model)
    shape = None if model is None or expanded(model).is_dir() else shape_file(model)
    if shape is None and model is not None and "/" not in model and not expanded(model).is_dir():
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
    for name in _BESIDE_TOKENIZER:
        shutil.copyfile(DEMO_MODEL / name, folder / name)
    tokenizer = json.loads((DEMO_MODEL / "tokenizer.json").read_bytes())
    words = tokenizer["model"]["vocab"]
    # The other tokens are words, too: of what has no text, a stream shows nothing.
    words |= {f"Ġ{token}": token for token in range(len(words), json.loads(shape.read_bytes())["vocab_size"])}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder.resolve()


def folder_with_tokenizer(model: Path, tokenizer: str, run_dir: Path, *, is_local: bool) -> Path:
    """Returns a folder for a model with another tokenizer: all services read one folder, so that none can have another
    tokenizer than the others. It lies in `run_dir`, with links to the model's files but for its tokenizer's, and to
    those of the other tokenizer; one for each pair, as a stack that runs may have the former one. Raises CommandError
    where there is no such tokenizer, or the model has no rows for all of its tokens."""
    from shared.models.tokenizer_files import TokenizerUnusable, load_tokenizer  # nothing else here needs the library

    if not is_local:
        raise CommandError(
            "--tokenizer: not with --launcher ray, whose nodes do not see this machine's links", status=2
        )
    source = _tokenizer_folder(tokenizer)
    pair = blake2b(f"{model}\n{source}".encode(), digest_size=8).hexdigest()
    folder = run_dir / "tokenizers" / f"{model.name}-{pair}"
    folder.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if not _is_of_tokenizer(path):
            _link(folder / path.name, path)
    for path in source.iterdir():
        if _is_of_tokenizer(path):
            _link(folder / path.name, path)
    try:
        files = load_tokenizer(folder)
    except TokenizerUnusable as error:
        raise CommandError(f"--tokenizer {tokenizer}: {error}") from None
    if (size := files.tokenizer.get_vocab_size(with_added_tokens=True)) > files.vocab_size:
        raise CommandError(f"--tokenizer {tokenizer}: it has {size} tokens; the model has rows for {files.vocab_size}")
    return folder.resolve()


def _tokenizer_folder(tokenizer: str) -> Path:
    folder = expanded(tokenizer)
    if folder.is_dir():  # as `save_pretrained` of a tokenizer writes it, without a config.json
        if not (folder / "tokenizer.json").is_file():
            raise CommandError(f"--tokenizer {tokenizer}: no tokenizer.json there", status=2)
        return folder.resolve()
    try:
        return resolve_model(tokenizer, weights=False)
    except ModelNotFound as error:
        raise CommandError(f"--tokenizer {error}") from None


def _is_of_tokenizer(path: Path) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in TOKENIZER_FILES)


def _link(link: Path, target: Path) -> None:
    """As it is now: a snapshot of the hub may have been fetched anew."""
    if link.is_symlink() and link.readlink() == target:
        return
    link.unlink(missing_ok=True)
    link.symlink_to(target)
