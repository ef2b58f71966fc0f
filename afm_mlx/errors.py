"""Errors that the user can mend.

Each message says what is wrong, what was got, what is allowed and what to do next. The command line
prints it on one line and exits with status 2; everything else that is raised is a defect of ours.
"""


class AFMError(ValueError):
    """Something the caller got wrong, or a file that can't be used."""


class ConfigError(AFMError):
    """An architecture description with unknown, missing or contradictory keys."""


class CheckpointError(AFMError):
    """A weight file that is missing, damaged, unsafe, or of another shape."""


class TokenizerError(AFMError):
    """Tokenizer files or chat messages that can't be used."""


class ContextLengthError(AFMError):
    """More tokens than the context, or the cache, holds."""


class CacheFileError(AFMError):
    """A prompt cache file that is damaged or belongs to another model or adapter."""


class RequestError(AFMError):
    """A generation request that can't be honoured as it was asked."""


class DataError(AFMError):
    """A data file with a line that can't be used."""


class TrainingError(AFMError):
    """A training run that can't go on, or a run folder that can't be continued."""
