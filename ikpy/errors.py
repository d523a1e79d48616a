"""Errors that are shown to the user as one line, with exit status 1 and no traceback."""


class IkpyError(Exception):
    """Base of every error a user can cause; the message says what, where and what to do."""


class FileFormatError(IkpyError):
    """A file is malformed, truncated or inconsistent."""


class UnsupportedError(IkpyError):
    """The input is valid but this version (or this machine) cannot handle it."""


class UsageError(IkpyError):
    """An option or argument is wrong or contradicts another one."""


class ResourceError(IkpyError):
    """Memory, disk or a device is missing or too small."""


class OutOfMemoryError(ResourceError):
    """Memory is too small now; it may be large enough when others have released theirs."""
