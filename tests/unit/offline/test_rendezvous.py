"""Where the ranks of an engine in this process meet, and what those leave that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.offline.rendezvous import new_rendezvous

START = "import sys; from pathlib import Path; from services.offline.rendezvous import new_rendezvous as new; "


def test_what_a_process_has_left_that_is_gone_is_removed_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = (
        f"{START}path = Path(new(Path(sys.argv[1])).removeprefix('file://')); path.touch(); print(path, flush=True); "
    )
    ended = subprocess.run([sys.executable, "-c", made, tmp_path], text=True, capture_output=True, check=True)
    assert not Path(ended.stdout.strip()).exists(), "one that ends by itself leaves nothing"
    made += "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    killed = subprocess.run([sys.executable, "-c", made, tmp_path], text=True, capture_output=True, check=False)
    left = Path(killed.stdout.strip())
    own = Path(new_rendezvous(tmp_path / "elsewhere").removeprefix("file://")).name
    _, _, gone, unique = left.name.split("-")
    elsewhere = f"baton-0123456789ab-{gone}-{unique}"  # of another host or container, with the same number
    others = [tmp_path / name for name in (own, elsewhere, "baton-models", left.name.replace("-", "_"))]
    for path in others:
        path.touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
        new_rendezvous(tmp_path)
    assert left.exists(), "another user's"
    new = new_rendezvous(tmp_path)
    assert not left.exists()
    assert all(path.exists() for path in others)
    assert new.startswith(f"file://{tmp_path}/baton-")
    assert new != new_rendezvous(tmp_path)
