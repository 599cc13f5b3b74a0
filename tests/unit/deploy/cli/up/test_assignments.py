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


def test_switches_take_what_the_environment_takes() -> None:
    given = [f"worker.enforce_eager={value}" for value in ("1", "true", "True")]
    assert [parsed_settings([each]) for each in given] == [{"worker": {"enforce_eager": "true"}}] * 3
    assert parsed_settings(["worker.enforce_eager=0"]) == {"worker": {"enforce_eager": "false"}}


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("worker.enforce_eager=maybe", "; one of true, false is expected"),
        ("worker.ops=fast", "; one of auto, torch, native, triton is expected"),
        ("worker.max_num_seqs=0", "1"),
        ("worker.kv_memory=much", "a size is a number with an optional unit such as 512MiB, 2GiB or 1.5GB"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_as_it_was_given(assignment: str, complaint: str) -> None:
    with pytest.raises(CommandError) as error:
        parsed_settings([assignment])
    assert str(error.value).startswith(f"--set {assignment}: ")
    assert str(error.value).endswith(complaint)


def test_a_setting_that_not_every_service_has_is_refused_with_whose_it_is() -> None:
    with pytest.raises(CommandError, match=r"--set policy=priority: no such setting, scheduler\.policy is near"):
        parsed_settings(["policy=priority"])


def test_later_settings_win() -> None:
    assert merged({"a": {"k": "1", "l": "1"}}, {"a": {"k": "2"}}) == {"a": {"k": "2", "l": "1"}}
