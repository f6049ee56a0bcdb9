"""The one error that a user of the scripts sees."""


class DataError(Exception):
    """The input or the output can't be used; the message names the path and the way out."""
