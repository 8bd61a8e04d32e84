"""A call must not change what a module consists of, and what it changed is put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fzero as fz


class Changes(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.inner, self.what, self.calls = nn.Linear(1, 1), what, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        if self.what == "a buffer in place":
            self.seen += 1
        elif self.what == "another buffer":
            self.seen = torch.ones(())
        elif self.what == "a submodule":
            self.inner = nn.Linear(1, 1)
        elif self.what == "a param":
            self.more = nn.Parameter(torch.ones(1))
        return self.inner(x) + self.calls


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("a buffer in place", "its buffer 'seen'"),
        ("another buffer", "its buffer 'seen'"),
        ("a submodule", "its submodule 'inner'"),
        ("a param", "its param 'more'"),
    ],
)
def test_a_change_is_refused_by_name_and_undone(what: str, said: str) -> None:
    module = Changes(what)
    apply, params = fz.functional(module)
    for _ in range(2):  # the second call finds the module as it was
        with pytest.raises(ValueError, match=rf"changed {said} in its forward"):
            apply(params, torch.ones(1, 1))
    assert module.seen == 0 and module.calls == 0


def test_attributes_are_the_copys_own_and_count() -> None:
    module = Changes("nothing")
    apply, params = fz.functional(module)
    first, second = (apply(params, torch.ones(1, 1)) for _ in range(2))
    torch.testing.assert_close(second - first, torch.ones(1, 1))
    assert module.calls == 0


def test_batch_norm_in_training_says_what_to_do() -> None:
    apply, params = fz.functional(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"running_mean.*fz.functional\(module, buffers=True\).*call module.eval\(\)"):
        apply(params, torch.randn(4, 2))
