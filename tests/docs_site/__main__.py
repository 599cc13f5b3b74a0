"""`python -m tests.docs_site`: builds the site in build/docs; a link or an anchor that leads nowhere ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs_site.sources import write_sources
from tests.support.paths import REPOSITORY

FOLDER = REPOSITORY / "build" / "docs"
DEADLINE = 300.0


def built(folder: Path) -> subprocess.CompletedProcess[str]:
    """Builds `folder`/site of the sources that are there."""
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file"]
    return subprocess.run(
        [*command, str(folder / "mkdocs.yml")],
        env={**os.environ, "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE,
    )


def main() -> int:
    """The exit status of the build."""
    write_sources(FOLDER)
    done = built(FOLDER)
    if done.returncode != 0:
        print(done.stdout.partition("Traceback")[0], file=sys.stderr)
        return 1
    print(f"{FOLDER}/site/index.html; with search: {sys.executable} -m http.server --directory {FOLDER}/site")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
