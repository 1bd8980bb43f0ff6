"""Errors of libraries become one line that says what failed and what to do."""

from __future__ import annotations

import pytest

from sparring.core.errors import UserError, one_line


def test_an_error_of_a_named_kind_becomes_one_line() -> None:
    for then, end in (("", ""), ("train again", "; train again")):
        with pytest.raises(UserError) as caught, one_line("cannot read a", KeyError, OSError, then=then):
            raise OSError("first\nsecond")
        assert str(caught.value) == f"cannot read a: first{end}"
        assert isinstance(caught.value.__cause__, OSError)


def test_a_user_error_and_other_kinds_pass() -> None:
    """A UserError is a ValueError, and it already is one line."""
    with pytest.raises(UserError, match=r"^ours$"), one_line("cannot read a", ValueError):
        raise UserError("ours")
    with pytest.raises(TypeError, match=r"^theirs$"), one_line("cannot read a", ValueError):
        raise TypeError("theirs")
