"""Errors that are the user's to fix."""

from __future__ import annotations

import errno


class UserError(ValueError):
    """Bad input: one line that names the bad value and says what to do. The command line prints it and exits with code 2."""


def disk_full(error: BaseException | None) -> bool:
    """Whether a full disk is at the root of an error, whoever met it: the system, polars or Spark."""
    while error is not None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in str(error) or "os error 28" in str(error):
            return True
        error = error.__cause__
    return False
