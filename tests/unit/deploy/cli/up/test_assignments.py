"""What `--set` assigns."""

from __future__ import annotations

import pytest

from deploy.cli.up.assignments import merged, parsed_settings
from deploy.errors import CommandError


def test_settings_name_a_service_or_speak_to_all() -> None:
    assert parsed_settings(["scheduler.run-ahead=0", "log_level=debug", "gateway.api_keys=a=b"]) == {
        "scheduler": {"run_ahead": "0"},
        "*": {"log_level": "debug"},
        "gateway": {"api_keys": "a=b"},
    }


@pytest.mark.parametrize("text", ["", "x", "=1", "scheduler.=1", "kitchen.sink=1", "a b=1", "supervisor.x.y=1"])
def test_settings_that_mean_nothing_are_refused_by_name(text: str) -> None:
    with pytest.raises(CommandError, match="--set"):
        parsed_settings([text])


def test_later_settings_win() -> None:
    assert merged({"a": {"k": "1", "l": "1"}}, {"a": {"k": "2"}}) == {"a": {"k": "2", "l": "1"}}
