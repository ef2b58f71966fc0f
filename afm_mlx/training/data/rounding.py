"""Sizes of arrays rounded up, so that training steps have few shapes."""


def round_up(n: int, multiple: int) -> int:
    """Return the least multiple that is `n` or more."""
    return -(-n // multiple) * multiple
