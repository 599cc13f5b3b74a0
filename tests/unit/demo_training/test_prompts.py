"""The shipped prompts are those that the generator makes."""

from tests.demo_training.prompts import FILE, written


def test_the_shipped_prompts_are_as_generated() -> None:
    assert FILE.read_bytes() == written(), "python -m tests.demo_training.prompts"
