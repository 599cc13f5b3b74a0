"""Processes of xdist that are forked from its controller have what that imported, and are processes as all others."""

from __future__ import annotations

import pytest

from tests.support.paths import REPOSITORY

pytest_plugins = ["pytester"]

CONFTEST = """
from tests.support.lanes.forked_workers import fork_workers

def pytest_xdist_setupnodes(config, specs):
    assert fork_workers(config, specs, config.rootpath / "support") == 2
"""
TESTS = """
import os
import sys

FOUND = "colorsys" in sys.modules
import colorsys
import warned

def test_what_it_imports_is_there():
    assert FOUND
    assert sys.modules["__main__"].__dict__.get("__spec__") is None

def test_that_fails():
    left = 1
    assert left == 2

def test_that_ends_its_process():
    os._exit(7)

def test_after_that():
    assert True
"""


@pytest.fixture(autouse=True)
def _some_tests(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(test_some=TESTS, warned="import warnings\nwarnings.warn('it is old')")


def test_they_have_imported_what_tests_import_and_one_that_crashes_is_replaced(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-n", "2")
    assert result.parseoutcomes()["passed"] == 2
    result.stdout.fnmatch_lines(["*assert 1 == 2*"])
    assert "crashed while running 'test_some.py::test_that_ends_its_process'" in result.stdout.str()


def test_warnings_are_errors_as_where_nothing_is_imported_before(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-n", "2", "-W", "error")
    result.stdout.fnmatch_lines(["*UserWarning: it is old*"])
    assert result.ret != 0
