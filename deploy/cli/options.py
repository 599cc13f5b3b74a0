"""What several commands share of their command line: which stack, and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Name = Annotated[str, typer.Option("--name", help="Which stack.", envvar="BATON_NAME")]
RunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Where the stack's logs and state lie; default ~/.local/state/baton/NAME."),
]
AsJson = Annotated[bool, typer.Option("--json", help="For scripts.")]
DEFAULT = "default"
