"""Tests are compiled once, as pytest would, before several processes collect them."""

from __future__ import annotations

import pytest
from _pytest.assertion import rewrite

from tests.support.compiled_tests import compile_missing

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
