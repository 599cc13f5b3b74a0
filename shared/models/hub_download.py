"""Fetching a repository of the Hugging Face hub, saying how much it is and how long it took."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

Say = Callable[[str], None]
_MEGABYTE = 10**6
SAY_EVERY = 10.0
"""Seconds between two lines where there is no terminal, whose bars the hub's library draws."""


def hub_errors() -> tuple[type[Exception], ...]:
    """What fetching raises where the hub does not answer, or not with what was asked for."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # Errors of connections pass through it as the HTTP library raises them, which changes with the hub's version.
    return (*HfHubHTTPError.__bases__, HFValidationError, LocalEntryNotFoundError, OSError, ValueError)


class HubModel(NamedTuple):
    """A model of the hub: OWNER/NAME[@REVISION], and [:Q4_K_M] of a repository of GGUF files."""

    repository: str
    revision: str | None = None
    """A branch, a tag or a commit; None: the repository's main branch."""
    quantization: str | None = None
    """As it stands in the name of one of its GGUF files."""

    @classmethod
    def parse(cls, name: str) -> HubModel:
        """What is no name of this kind is the repository as it is."""
        name, _, quantization = name.partition(":")
        repository, _, revision = name.partition("@")
        return cls(repository, revision or None, quantization or None)


def fetched(model: HubModel, patterns: Sequence[str], say: Say | None) -> Path:
    """The folder with the files of the repository that have one of these patterns, fetched unless they are here.

    Raises `hub_errors()`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    repository, wanted = model.repository, list(patterns)
    missing = _missing_bytes(model, patterns) if say is not None else 0
    if not missing or not sys.stderr.isatty():
        disable_progress_bars()
    if say is None or not missing:
        return Path(snapshot_download(repository, revision=model.revision, allow_patterns=wanted))
    say(f"fetching {repository} from the Hugging Face hub: {missing / _MEGABYTE:,.0f} MB")
    began = time.monotonic()
    with _progress_reported(repository, missing, say) if not sys.stderr.isatty() else contextlib.nullcontext():
        folder = Path(snapshot_download(repository, revision=model.revision, allow_patterns=wanted))
    say(f"{repository}: {missing / _MEGABYTE:,.0f} MB in {time.monotonic() - began:.1f} s")
    return folder


def listed(model: HubModel) -> list[str]:
    """The names of the repository's files. Raises `hub_errors()`."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(model.repository, revision=model.revision)  # `list_repo_files` tries for 20 s
    return [each.rfilename for each in info.siblings or ()]


def _missing_bytes(model: HubModel, patterns: Sequence[str]) -> int:
    """Bytes of the wanted files that are not here; 0 where the hub does not say."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        info = HfApi().model_info(model.repository, revision=model.revision, files_metadata=True)
    except hub_errors():
        return 0
    wanted = (each for each in info.siblings or () if any(fnmatch(each.rfilename, pattern) for pattern in patterns))
    return sum(
        each.size or 0
        for each in wanted
        if try_to_load_from_cache(model.repository, each.rfilename, revision=info.sha) is None
    )


@contextlib.contextmanager
def _progress_reported(repository: str, missing: int, say: Say) -> Iterator[None]:
    """A line every few seconds while the context is open: how much has come."""
    before, ended = _bytes_here(repository), threading.Event()

    def watch() -> None:
        while not ended.wait(SAY_EVERY):
            here = _bytes_here(repository) - before
            say(f"{repository}: {here / _MEGABYTE:,.0f} of {missing / _MEGABYTE:,.0f} MB")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bytes_here(repository: str) -> int:
    """In the hub's cache, of files that are being fetched as well."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    blobs = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model") / "blobs"
    total = 0
    for path in blobs.glob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total
