"""The table of architectures and features in docs/models.md holds what each cell gives when it is run."""

import pytest

from tests.tools.zoo_features import (
    ARCHITECTURES,
    FEATURES,
    PAGE,
    SLOW,
    WORKS,
    cell,
    cells,
    table,
    written_cells,
)
from tests.tools.zoo_guests import Guest

FAST = [name for name in FEATURES if name not in SLOW]


def written(name):
    return written_cells(PAGE.read_text())[name]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cells_of(name):
    """If it is another: python -m tests.tools.zoo_features."""
    found = written(name)
    assert cells(name, FAST) == {feature: found[feature] for feature in FAST}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_slow_cells_of(name):
    found = written(name)
    assert cells(name, SLOW) == {feature: found[feature] for feature in SLOW}


def test_the_table_is_whole():
    page = PAGE.read_text()
    columns = written_cells(page)
    assert list(columns) == list(ARCHITECTURES)
    for column in columns.values():
        assert list(column) == list(FEATURES)
        assert all(text == WORKS or text.endswith(".") for text in column.values())
    assert table(columns) in page


def test_faults_are_no_refusals(tmp_path):
    guest = Guest("Qwen3", tmp_path)

    def fail(guest):
        raise KeyError("head")

    with pytest.raises(KeyError):
        cell(guest, fail)
