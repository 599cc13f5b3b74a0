"""The pages lead a reader to files and modules that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY

FOLDERS = ("shared", "services", "kvstore", "deploy", "tests")
PAGES = [REPOSITORY / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")] + sorted(
    (REPOSITORY / "docs").glob("*.md")
)
FILE = re.compile(r"(?:shared|services|kvstore|deploy|tests|docs)/[\w./-]+\.(?:py|md|cpp|proto)\b")
MODULE = re.compile(r"`([\w/]+\.py)`")
"""With the folders that lead to it, or some of them."""
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
PROGRAM = re.compile(r"python3? -m ((?:shared|services|kvstore|deploy|tests)[\w.]*)")


MODULES = [f"/{path.relative_to(REPOSITORY)}" for top in FOLDERS for path in (REPOSITORY / top).rglob("*.py")]


def modules_named(name: str) -> list[str]:
    """Those whose paths end with `name`, which may leave out the folders that lead there."""
    return [module for module in MODULES if module.endswith(f"/{name}")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [name for name in FILE.findall(text) if not (REPOSITORY / name).exists()] == []
    assert [name for name in MODULE.findall(text) if not modules_named(name)] == []
    assert [name for name in LINK.findall(text) if not (page.parent / name).exists()] == []


def test_no_page_has_both_sides_of_a_merge() -> None:
    pages = [*PAGES, REPOSITORY / "CHANGELOG.md", *(REPOSITORY / "docs").rglob("*.md")]
    marks = re.compile(r"^(?:<{7} |={7}$|>{7} )", re.MULTILINE)
    assert [page.name for page in pages if marks.search(page.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "page", [*PAGES, REPOSITORY / "deploy" / "demo" / "README.md"], ids=lambda page: str(page.name)
)
def test_every_module_that_a_page_runs_exists(page: Path) -> None:
    named = (
        REPOSITORY / name.replace(".", "/")
        for name in PROGRAM.findall(page.read_text(encoding="utf-8"))
        if name != "services.NAME"
    )
    assert [
        path for path in named if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file()
    ] == []


def test_every_message_that_is_explained_is_said_by_the_code() -> None:
    """As a person finds it: what differs each time is an ellipsis on the page."""
    page = (REPOSITORY / "docs/troubleshooting.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?:\d{3} \| )?`([^`]+)` \|", page, re.MULTILINE)
    messages = [part.strip() for row in rows if not row.startswith("baton ") for part in row.split("…") if part.strip()]
    assert len(messages) > 30
    code = "".join(
        (REPOSITORY / module[1:]).read_text(encoding="utf-8") for module in MODULES if "/tests/" not in module
    )
    assert [message for message in messages if message not in code] == []


def test_decisions_are_numbered_once_each() -> None:
    """Numbers are set aside for decisions that are under way."""
    files = sorted((REPOSITORY / "docs/adr").glob("0*.md"))
    titles = [file.read_text(encoding="utf-8").split(".", 1)[0] for file in files]
    numbers = [int(file.name[:4]) for file in files]
    assert numbers == sorted(set(numbers))
    assert titles == [f"# {number}" for number in numbers]
