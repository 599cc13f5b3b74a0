"""`baton --install-completion`, in a real bash with a home of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = shutil.which("bash")
BATON = Path(sys.executable).parent / "baton"

pytestmark = pytest.mark.skipif(
    BASH is None or not BATON.exists(), reason="needs bash and the installed command `baton`"
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a user who has a .bashrc, and has installed the completion."""
    folder = tmp_path_factory.mktemp("home")
    (folder / ".bashrc").write_text("export KEPT=1\n")
    said = in_bash(folder, "baton --install-completion bash; exit $?")  # the shell has to outlive it: it is looked for
    assert "completion installed in" in said
    return folder


def in_bash(home: Path, script: str) -> str:
    path = f"{BATON.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(BASH), "--norc", "-c", script],
        env={"HOME": str(home), "PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def completed(home: Path, *words: str) -> list[str]:
    """What TAB offers behind these words, as bash asks the function that is bound to `baton`."""
    quoted = " ".join(f"'{word}'" for word in words)
    script = f"""
        source ~/.bashrc
        COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}
        function=$(complete -p baton | sed 's/.*-F \\([^ ]*\\) .*/\\1/')
        $function baton
        printf '%s\n' "$KEPT" "${{COMPREPLY[@]}}"
    """
    kept, *offered = in_bash(home, script).splitlines()
    assert kept == "1"
    return offered


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("baton", "dr"), {"drain"}),
        (("baton", "support"), {"support-bundle"}),
        (("baton", "up", "--router-p"), {"--router-policy"}),
        (("baton", "up", "--kvstore-mem"), {"--kvstore-memory"}),
        (("baton", "logs", "--fol"), {"--follow"}),
        (("baton", "lora", "un"), {"unload"}),
    ],
)
def test_commands_options_and_choices_are_completed(home: Path, words: tuple[str, ...], offered: set[str]) -> None:
    assert set(completed(home, *words)) == offered


def test_a_word_that_nothing_begins_with_gets_no_offer(home: Path) -> None:
    assert completed(home, "baton", "xyz") in ([], [""])
