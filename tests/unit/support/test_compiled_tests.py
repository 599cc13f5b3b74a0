"""What several processes would make each is made once before they collect tests, as each would make it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from hypothesis import configuration

from tests.support.lanes.compiled_tests import compile_missing, keep_constants

pytest_plugins = ["pytester"]


def test_what_is_missing_is_compiled_as_pytest_looks_for_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_good="def test_good(): assert 1 + 1 == 2", test_spoilt="def test_spoilt(: pass")
    config = pytester.parseconfigure()
    assert compile_missing(config, pytester.path) == 2
    compiled = rewrite.get_cache_dir(pytester.path / "test_good.py") / f"test_good{rewrite.PYC_TAIL}"
    code = rewrite._read_pyc(pytester.path / "test_good.py", compiled)
    assert code is not None
    assert "@pytest_ar" in code.co_names
    assert compile_missing(config, pytester.path) == 1, "what has an error is left to those who collect it"


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """Where hypothesis keeps constants for this test."""
    usual = configuration.storage_directory().path
    configuration.set_hypothesis_home_dir(tmp_path / "hypothesis")
    yield tmp_path / "hypothesis/constants"
    configuration.set_hypothesis_home_dir(usual)


def test_constants_of_all_modules_are_kept_where_hypothesis_looks_for_them(tmp_path: Path, kept: Path) -> None:
    module = tmp_path / "shared/inner/module.py"
    module.parent.mkdir(parents=True)
    module.write_text("LIMIT = 81273\n")
    assert keep_constants(tmp_path) == 1
    (file,) = kept.iterdir()
    assert file.read_text().startswith(f"# file: {module}\n")
    assert "81273" in file.read_text()
    assert keep_constants(tmp_path) == 0, "they are there"
