"""The table of architectures and features in docs/models.md is the one whose cells are tested."""

from tests.architecture.model_matrix import ARCHITECTURES, MODEL_FEATURES, PAGE, REFUSED, with_table


def test_the_page_has_the_table_whose_cells_are_tested() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == with_table(text), "python -m tests.architecture.model_matrix"


def test_what_is_refused_is_a_cell() -> None:
    names = {each.name for each in ARCHITECTURES}
    assert [cell for cell in REFUSED if cell[0] not in names or cell[1] not in MODEL_FEATURES] == []
