"""The site of docs/: every link of it leads somewhere, and it loads nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs_site.__main__ import built
from tests.docs_site.sources import DOCS, MADE_PAGES, ROOT_PAGES, write_sources

LOADED = re.compile(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"([^\"]+)\"|<link\b[^>]*\bhref=\"([^\"]+)\"")
OF_A_STYLE = re.compile(r"(?:url\(|@import\s+)[\"']?(?!data:)((?:https?:)?//[^)\"']+)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "build"
    write_sources(folder)
    done = built(folder)
    assert done.returncode == 0, done.stdout
    return folder


def test_every_page_is_there_and_has_a_place_in_the_navigation(folder: Path) -> None:
    names = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "examples" not in path.parts]
    pages = {name.removesuffix("README.md") + "index.md" if name.endswith("README.md") else name for name in names}
    home = (folder / "site" / "index.html").read_text(encoding="utf-8")
    for page in pages | {*MADE_PAGES, *ROOT_PAGES.values()}:
        file = folder / "site" / page.replace(".md", ".html")
        assert file.is_file(), page
        assert page == "index.md" or f'href="./{page.replace(".md", ".html")}"' in home, f"{page} is in no menu"


def test_nothing_is_loaded_from_elsewhere(folder: Path) -> None:
    pages = list((folder / "site").rglob("*.html"))
    loaded = {
        name for page in pages for pair in LOADED.findall(page.read_text(encoding="utf-8")) for name in pair if name
    }
    assert loaded
    assert [name for name in loaded if re.match(r"(?:https?:)?//", name)] == []
    styles = list((folder / "site").rglob("*.css"))
    assert styles
    assert [found for style in styles for found in OF_A_STYLE.findall(style.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("link", ["[x](nowhere.md)", "[x](api.md#no-such-place)"])
def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path, link: str) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text(f"# Home\n\n{link}\n")
    (tmp_path / "pages" / "api.md").write_text("# API\n")
    (tmp_path / "mkdocs.yml").write_text("site_name: Baton\ndocs_dir: pages\ntheme:\n  name: material\n")
    done = built(tmp_path)
    assert done.returncode != 0
    assert "does not exist" in done.stdout
