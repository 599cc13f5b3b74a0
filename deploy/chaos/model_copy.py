"""A folder that looks like the model's, so that its weights can be broken without touching the model."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Damage = Literal["missing", "truncated"]
WEIGHTS = "*.safetensors"
KEPT_BYTES = 4096
"""Of a truncated file: its header says that there is more."""


class ModelCopy:
    """Owns a folder of links to the files of a model."""

    def __init__(self, model: Path, folder: Path) -> None:
        """`folder` is made. Raises OSError."""
        self.folder = folder
        self._model = model.resolve()
        folder.mkdir(parents=True)
        for file in self._model.iterdir():
            (folder / file.name).symlink_to(file)

    def damage(self, how: Damage) -> None:
        """Breaks every file of weights, for who opens it from now on. Raises OSError."""
        for file in self._model.glob(WEIGHTS):
            link = self.folder / file.name
            link.unlink()
            if how == "truncated":
                with file.open("rb") as whole:
                    link.write_bytes(whole.read(KEPT_BYTES))

    def repair(self) -> None:
        """All files are as they were. Raises OSError."""
        for file in self._model.glob(WEIGHTS):
            link = self.folder / file.name
            link.unlink(missing_ok=True)
            link.symlink_to(file)
