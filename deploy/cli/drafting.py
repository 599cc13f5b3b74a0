"""What `--speculative` says, checked before anything starts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from deploy.cli.errors import CommandError
from services.worker.speculation.settings import SpeculationError, check_place, read_speculation


def drafting(text: str | None, *, device: str | None, stages: int) -> str | None:
    """For the workers, which run elsewhere: its `model` as an absolute path. `stages`: the most that an engine of this
    stack has. Raises CommandError."""
    if text is None:
        return None
    try:
        settings = read_speculation(text)
        check_place(settings, device=device or "", stages=stages)
    except SpeculationError as error:
        raise CommandError(f"--{error}", status=2) from None
    if settings.model is not None:
        folder = Path(settings.model).expanduser()
        if not folder.is_dir():
            raise CommandError(f"--speculative: model {settings.model}: there is no such directory", status=2)
        settings = msgspec.structs.replace(settings, model=str(folder.absolute()))
    return msgspec.json.encode(settings).decode()
