"""The one error of this package."""


class MILError(ValueError):
    """A package that can't be read or run as it is, or inputs that it doesn't take."""
