"""Errors that are the user's to fix."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input: one line that names the bad value and says what to do. The command line prints it and exits with code 2."""
