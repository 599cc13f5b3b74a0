"""The pages of the site as Markdown: those of docs/, those of the repository's root, and those that are made from code.

README.md, ARCHITECTURE.md and others of the root are pages, too. A link to a file or folder of code becomes its words,
as the site has no code.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.docs_site import api_page, commands_page, messages_page, metrics_page
from tests.support.paths import REPOSITORY

DOCS = REPOSITORY / "docs"
CONFIGURATION = REPOSITORY / "mkdocs.yml"
ROOT_PAGES: Mapping[str, str] = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/demo/README.md": "demo_model.md",
}
"""Files outside docs/, and what they are called on the site."""
MADE_PAGES: Mapping[str, Callable[[], str]] = {
    "reference/api.md": api_page.page,
    "reference/commands.md": commands_page.page,
    "reference/messages.md": messages_page.page,
    "reference/metrics.md": metrics_page.page,
}
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\(([^)#:\s]+)((?:#[^)\s]*)?)\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def write_sources(folder: Path) -> Path:
    """Writes all pages below `folder`, and the configuration of a build beside them, whose path is returned."""
    pages = folder / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    for path in DOCS.rglob("*"):
        if path.is_file():
            name = path.relative_to(DOCS)
            (pages / name).parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                (pages / name).write_text(on_site(path.read_text(encoding="utf-8"), f"docs/{name}"), encoding="utf-8")
            else:
                shutil.copyfile(path, pages / name)
    for source, target in ROOT_PAGES.items():
        text = (REPOSITORY / source).read_text(encoding="utf-8")
        (pages / target).write_text(on_site(text, source), encoding="utf-8")
    for target, make in MADE_PAGES.items():
        (pages / target).parent.mkdir(exist_ok=True)
        (pages / target).write_text(make(), encoding="utf-8")
    with (pages / "adr" / "README.md").open("a", encoding="utf-8") as file:
        file.write("\n" + "\n".join(_decisions()) + "\n")
    configuration = folder / "mkdocs.yml"
    configuration.write_text(yaml.safe_dump(_configuration(), sort_keys=False), encoding="utf-8")
    return configuration


def _configuration() -> dict[str, Any]:
    """With the pages that no section of the navigation names, and the decisions."""
    configuration: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text(encoding="utf-8"))
    nav = configuration["nav"]
    named = set(_paths(nav))
    pages = sorted(path.name for path in DOCS.glob("*.md"))
    if more := [each for each in pages if each not in named]:
        nav.append({"More": more})
    nav.append({"Decisions": ["adr/README.md", *sorted(f"adr/{path.name}" for path in DOCS.glob("adr/0*.md"))]})
    return configuration


def _paths(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for each in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _paths(each)


def _decisions() -> Iterator[str]:
    for path in sorted(DOCS.glob("adr/0*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        number, _, text = title.partition(". ")
        yield f"- {number}: [{text}]({path.name})"


def on_site(text: str, source: str) -> str:
    """Text of a file of the repository with its links as the site has them; examples of code stay as they are."""

    def prose(part: str) -> str:
        return _LINK.sub(lambda found: _linked(found, source), part)

    parts = _FENCED.split(text)
    return "".join(part if index % 2 else prose(part) for index, part in enumerate(parts))


def _linked(found: re.Match[str], source: str) -> str:
    image, text, target, anchor = found.groups()
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    here = ROOT_PAGES.get(source) or source.removeprefix("docs/")
    there = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if there is None or (REPOSITORY / path).is_dir():
        return text
    return f"{image}[{text}]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{anchor})"
