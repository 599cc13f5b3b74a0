"""Reads what a checkpoint says of what prepares its images, videos and sounds, in the library's order. No torch.

`transformers` 5 saves all of it in one file, a part for each kind, and takes that part wherever it stands; older
checkpoints have a file for each kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import Raw, Struct

ProcessorPart = Literal["image_processor", "video_processor", "feature_extractor"]
"""As the library calls it."""

_WHOLE, _ONE = "processor_config.json", "preprocessor_config.json"
_FILES: dict[ProcessorPart, tuple[str, ...]] = {
    "image_processor": (_ONE,),
    "video_processor": ("video_preprocessor_config.json", _ONE),
    "feature_extractor": (_ONE,),
}
"""Where a part stands that is not within the whole, the first first."""

_R = TypeVar("_R", bound=Struct)

_NONE = Raw(b"null")


class _RawSavedProcessor(Struct):
    image_processor: Raw = _NONE
    video_processor: Raw = _NONE
    feature_extractor: Raw = _NONE
    audio_processor: Raw = _NONE
    """What some releases call the extractor."""


def read_processor(folder: Path, part: ProcessorPart, kind: type[_R]) -> _R:
    """What counts of the files in `folder` for `part`. Raises OSError where none has it, and ValueError, which names
    the file, for one that is no JSON or has other types."""
    name, content = _source(folder, part)
    return _decoded(name, content, kind)


def known_processor(folder: Path, part: ProcessorPart, kind: type[_R]) -> _R | None:
    """The same; None where no file has it, or is wrong, which is for those to say who read all of it."""
    try:
        return read_processor(folder, part, kind)
    except (OSError, ValueError):
        return None


def known_json(path: Path, kind: type[_R]) -> _R | None:
    """What the file `path` says; None as of `known_processor`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


def _source(folder: Path, part: ProcessorPart) -> tuple[str, bytes | Raw]:
    if (folder / _WHOLE).exists():
        whole = _decoded(_WHOLE, (folder / _WHOLE).read_bytes(), _RawSavedProcessor)
        found: Raw = getattr(whole, part)
        if part == "feature_extractor" and found == _NONE:
            found = whole.audio_processor
        if found != _NONE:
            return f"{_WHOLE}: {part}", found
    for name in _FILES[part]:
        if (folder / name).exists():
            return name, (folder / name).read_bytes()
    raise FileNotFoundError(f"{folder}: neither {_WHOLE} nor {' nor '.join(_FILES[part])} has what prepares its input")


def _decoded(name: str, content: bytes | Raw, kind: type[_R]) -> _R:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{name}: {error}") from None
