"""docs/features.md says what the tests' marks say, and no pair of features is left out."""

from tests.architecture.feature_matrix import PAGE, UNTESTED, page, untested


def test_the_page_is_what_the_marks_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.architecture.feature_matrix > docs/features.md"


def test_every_pair_of_features_is_tested_together_or_refused() -> None:
    assert set(untested()) == set(UNTESTED)
