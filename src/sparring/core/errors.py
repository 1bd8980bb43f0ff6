"""Errors that the user can fix, and helpers for their messages."""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """Bad input: one line that names the bad value and says what to do. The command line prints it and exits with 2.

    `argument` names the argument that would fix it, and `value` its value: `str` appends them as Python code, and the
    command line as an option.
    """

    def __init__(self, message: str, argument: str = "", value: str = "...") -> None:
        super().__init__(message, argument, value)
        self.message, self.argument, self.value = message, argument, value

    def __str__(self) -> str:
        return f"{self.message}; set {self.argument}={self.value}" if self.argument else str(self.message)


def not_written(error: BaseException) -> bool:
    """Whether an error, also one wrapped by polars, is a full disk, a quota, a size limit or a read-only disk."""
    match = re.search(r"os error (\d+)", str(error))
    number = error.errno if isinstance(error, OSError) else int(match[1]) if match else None
    return number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def disk_full(error: BaseException | None) -> bool:
    """Whether a full disk caused an error, raised by the system, polars or Spark."""
    while error is not None:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left on device" in str(error) or "os error 28" in str(error):
            return True
        error = error.__cause__
    return False


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A hint to append to an error: ` (did you mean 'bir'?)`, or nothing if none is close. Case does not matter."""
    plain = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(name.lower(), plain, n=1)
    return f" (did you mean {plain[close[0]]!r}?)" if close else ""


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in Python, NumPy, PyTorch or polars, on the CPU or a GPU."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, for an error of one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@contextmanager
def one_line(what: str, *kinds: type[BaseException], then: str = "") -> Iterator[None]:
    """Turn errors of these kinds into a UserError of one line: what failed, the reason, and what to do.

    with one_line(f"cannot read {path}", OSError, ValueError): tomllib.loads(path.read_text())
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(f"{what}: {first_line(error)}{then and '; '}{then}") from error
