"""What the build backend puts the prefix before, and what it leaves alone."""

from __future__ import annotations

import ast
import re

import pytest

from deploy.wheel.names import PACKAGES, renamed
from tests.support.paths import REPOSITORY

MODULES = {"shared", "shared.ids", "services", "services.worker", "kvstore", "deploy.cli"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from shared.ids import X", "from baton.shared.ids import X"),
        ("from services import worker", "from baton.services import worker"),
        ("import shared.ids as ids", "import baton.shared.ids as ids"),
        ("def f():\n    from kvstore import core", "def f():\n    from baton.kvstore import core"),
        ('run("-m", "services.worker")', 'run("-m", "baton.services.worker")'),
        ('é = "é"; m = "deploy.cli"', 'é = "é"; m = "baton.deploy.cli"'),
        ('f"services.{name}"', 'f"baton.services.{name}"'),
        ('f"services.bench.{name}"', 'f"baton.services.bench.{name}"'),
    ],
)
def test_imports_and_names_of_modules_get_the_prefix(before: str, after: str) -> None:
    assert renamed(before, MODULES) == after


@pytest.mark.parametrize(
    "text",
    [
        "from sharedthings import x",
        "from . import shared",
        'service = "kvstore"',
        '"services.unknown"',
        '"see services.worker for more"',
        'f"kvstore.{node}.ask"',
        'f"services. {name}"',
        "# from shared.ids import X",
    ],
)
def test_what_is_no_module_of_ours_stays(text: str) -> None:
    assert renamed(text, MODULES) == text


def test_an_import_that_would_bind_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"line 2: import shared\.ids: write it with from or as"):
        renamed("x = 1\nimport shared.ids", MODULES)


def test_no_program_in_a_string_imports_by_a_name_that_a_wheel_changes() -> None:
    """Such as what `python -c` is given: the backend sees imports, and strings that are names of modules. Left
    out are the backend itself, which writes of such imports, and what installs a checkout."""
    ours = re.compile(rf"\b(?:from|import)\s+(?:{'|'.join(PACKAGES)})\.")
    found = [
        f"{file.relative_to(REPOSITORY)}:{node.lineno}"
        for package in PACKAGES
        for file in sorted((REPOSITORY / package).rglob("*.py"))
        if file.relative_to(REPOSITORY).parts[:2] not in {("deploy", "wheel"), ("deploy", "without_network")}
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ours.search(node.value)
    ]
    assert found == []
