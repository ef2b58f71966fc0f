"""The one kind of error here that is not a defect or a wrong argument."""


class SettingError(ValueError):
    """A variable in the environment with a value that can't be used."""
