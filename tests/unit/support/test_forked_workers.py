"""Processes of xdist that are forked from its controller have what that imported, and are processes as all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.lanes.forked_workers import lazy_names_imported_by, modules_imported_by, texts_of_tests
from tests.support.paths import REPOSITORY

pytest_plugins = ["pytester"]

CONFTEST = """
from tests.support.lanes import forked_server
from tests.support.lanes.forked_workers import fork_workers

forked_server.PRELOADED = ()

def pytest_xdist_setupnodes(config, specs):
    assert fork_workers(config, specs) == 2
"""
TESTS = """
import multiprocessing
import os
import sys

FOUND = "colorsys" in sys.modules
import colorsys
import warned

def test_what_it_imports_is_there():
    assert FOUND
    assert sys.modules["__main__"].__dict__.get("__spec__") is None

def say(sender):
    sender.send(FOUND)

def test_what_multiprocessing_forks_has_it_too():
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=say, args=(sender,))
    process.start()
    assert receiver.recv()
    process.join()

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
    assert result.parseoutcomes()["passed"] == 3
    result.stdout.fnmatch_lines(["*assert 1 == 2*"])
    assert "crashed while running 'test_some.py::test_that_ends_its_process'" in result.stdout.str()


def test_warnings_are_errors_as_where_nothing_is_imported_before(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-n", "2", "-W", "error")
    result.stdout.fnmatch_lines(["*UserWarning: it is old*"])
    assert result.ret != 0


def test_what_support_of_a_test_imports_is_found_too(tmp_path: Path) -> None:
    support = tmp_path / "tests/support"
    support.mkdir(parents=True)
    (support / "one.py").write_text(
        "import torch\nfrom transformers import (\n    AutoModel,\n)\nfrom tests.support import two\n"
    )
    (support / "two.py").write_text("from openai import OpenAI\nfrom tests.support.one import something\n")
    (support / "three.py").write_text("import anthropic\n")
    (tmp_path / "test_a.py").write_text("import os.path\nfrom tests.support import (\n    one,\n    nothing,\n)\n")
    texts = texts_of_tests([tmp_path / "test_a.py"], tmp_path)
    assert modules_imported_by(texts) == ["os.path", "torch", "transformers", "openai"]
    assert lazy_names_imported_by(texts) == [("transformers", "AutoModel")]
