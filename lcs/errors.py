"""The one exception that ends a command with a one-line message instead of a traceback."""


class LcsError(Exception):
    """Raised where the cause is known; the message names the value and what is allowed."""


class DiskFull(LcsError):
    """Nothing more can be written: no use in going on with the next file."""
