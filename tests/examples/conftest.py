"""Seeds, and a record of the values that the examples' data is made of."""

import pytest


@pytest.fixture
def seed(rng) -> int:
    return int(rng.integers(1 << 30))


@pytest.fixture
def drawn(monkeypatch) -> dict[str, set[str]]:
    """Values that were drawn for each split, while the test runs."""
    import values

    found: dict[str, set[str]] = {"train": set(), "test": set()}
    draw = values.Values.draw

    def recording_draw(self, kind, avoid=()):
        value = draw(self, kind, avoid)
        found[self.split].add(value)
        return value

    monkeypatch.setattr(values.Values, "draw", recording_draw)
    return found
