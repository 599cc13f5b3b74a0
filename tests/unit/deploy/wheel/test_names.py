"""What the build backend puts the prefix before, and what it leaves alone."""

from __future__ import annotations

import pytest

from deploy.wheel.names import renamed

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
