"""Rules of the house: how much lies in a module and in a folder, that names are used once, that imports go one way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.house import House, table
from tests.support.paths import REPOSITORY


@pytest.fixture(scope="module")
def house() -> House:
    return House(REPOSITORY)


def test_no_module_is_longer_than_one_wants_to_open(house: House) -> None:
    assert house.long_modules() == []


def test_no_folder_holds_more_modules_than_one_wants_to_choose_from(house: House) -> None:
    assert house.full_folders() == {}


def test_a_class_name_means_one_thing(house: House) -> None:
    assert house.repeated_classes() == {}


def test_sibling_packages_import_each_other_one_way_only(house: House) -> None:
    assert house.package_cycles() == []


def test_whoever_catches_what_cannot_be_decoded_catches_all_of_it(house: House) -> None:
    """msgspec's own error is not all: text that is no UTF-8 has Python's."""
    alone = re.compile(r"except [^:\n]*\bmsgspec\.DecodeError")
    assert [module.path for module in house.modules if alone.search(module.text)] == []


def made(folder: Path, **texts: str) -> House:
    """A checkout of a few modules: `a__b` is `shared/a/b.py`."""
    for name, text in texts.items():
        path = folder / "shared" / f"{name.replace('__', '/')}.py"
        for package in (path.parent, folder / "shared"):
            package.mkdir(parents=True, exist_ok=True)
            (package / "__init__.py").touch()
        path.write_text(text)
    return House(folder)


def test_code_lines_are_neither_docstrings_nor_comments_nor_blank(tmp_path: Path) -> None:
    text = '"""A\nB."""\n\nclass C:\n    """D."""\n\n    x = """a\n\nb"""  # e\n    """Of x."""\n    # f\n'
    house = made(tmp_path, c=text)
    assert sum(module.code_lines for module in house.modules) == 4


def test_siblings_that_import_each_other_are_found_wherever_they_do(tmp_path: Path) -> None:
    there = "from shared.b.two import x\n"
    back = "def f():\n    from shared.a import one\n"
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shared.a import one\n"
    assert made(tmp_path / "1", a__one=there, b__two=back).package_cycles() == [["shared.a", "shared.b"]]
    assert made(tmp_path / "2", a__one=there, b__two=types).package_cycles() == []
    assert made(tmp_path / "3", a__one=there, b__two="import shared.top\n", top="").package_cycles() == []


def test_a_class_name_that_two_modules_have_is_found_private_or_not(tmp_path: Path) -> None:
    house = made(tmp_path, a="class _X: ...\nclass Y: ...\n", b="def f():\n    class _X: ...\n")
    assert house.repeated_classes() == {"_X": ["shared/a.py", "shared/b.py"]}


def test_a_missing_docstring_is_found(tmp_path: Path) -> None:
    text = '"""M."""\ndef public(): ...\ndef _private(): ...\n'
    found = made(tmp_path, a=text).undocumented()
    assert [line.split(":")[0] for line in found] == ["shared/__init__.py", "shared/a.py"]


def test_the_table_has_a_column_for_each_checkout() -> None:
    shown = table({"before": {"files": 1200}, "now": {"files": 3, "step_files": 2}}).splitlines()
    assert [[cell.strip() for cell in line.split("|")[1:-1]] for line in (shown[0], *shown[2:])] == [
        ["", "before", "now"],
        ["files of the product", "1,200", "3"],
        ["one decode step: files", "", "2"],
    ]
