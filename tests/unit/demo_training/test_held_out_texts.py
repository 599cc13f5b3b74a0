"""The texts whose perplexity the demo model has by default."""

from tests.demo_training.held_out_texts import FILE, written


def test_the_file_holds_what_is_written_today() -> None:
    assert FILE.read_bytes() == written(), "python -m tests.demo_training.held_out_texts"
