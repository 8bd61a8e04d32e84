"""`during`: a context variable has another value inside, also where something fails."""

from __future__ import annotations

import contextvars

import pytest

from fzero.base.context import during

VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("test_during", default=0)


def test_the_value_holds_inside_and_ends_with_an_error_too() -> None:
    with during(VARIABLE, 1):
        with pytest.raises(KeyError), during(VARIABLE, 2):
            assert VARIABLE.get() == 2
            raise KeyError
        assert VARIABLE.get() == 1
    assert VARIABLE.get() == 0
