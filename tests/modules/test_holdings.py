"""What a module leads to, and on which way: attributes, hooks, closures, weak references; nothing of a library's."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from fzero.modules.holdings import Holdings, globals_of, is_atom

SHARED = torch.ones(2)


def reads_a_global() -> Any:
    return SHARED, torch


def test_ways_are_said_from_the_nearest_module() -> None:
    module, held = nn.Sequential(nn.Linear(1, 1)), torch.ones(3)
    module[0].note = {"x": [held]}  # type: ignore[assignment]
    module[0].register_forward_hook(lambda *_: reads_a_global())
    holdings = Holdings(module)
    assert holdings.way(id(held)) == "submodule '0', attribute 'note', entry 'x', item 0"
    assert "the global name 'SHARED'" in holdings.way(id(SHARED)) and "forward hook" in holdings.way(id(SHARED))
    assert id(held) in holdings.owned and id(SHARED) not in holdings.owned  # what only a hook holds
    assert id(module) in holdings.reaching({id(held)}) and id(held) not in holdings.reaching({id(SHARED)})


def test_what_refers_weakly_leads_there_too() -> None:
    module, other = nn.Linear(1, 1), nn.Linear(1, 1)
    module.ref = weakref.ref(other)  # type: ignore[assignment]
    assert id(other) in Holdings(module).objects


class Changing(weakref.WeakValueDictionary[int, nn.Module]):
    """Of which there are more entries each time that one looks, as where other threads write to it."""

    def __init__(self, late: list[nn.Module]) -> None:
        super().__init__()
        self.late = list(late)

    def items(self) -> Any:
        for pair in super().items():
            if self.late:
                self[len(self)] = self.late.pop()
            yield pair


def test_a_container_may_change_while_it_is_looked_at() -> None:
    module, held = nn.Linear(1, 1), [nn.Linear(1, 1) for _ in range(4)]
    module.note = Changing(held[1:])  # type: ignore[assignment]
    module.note[0] = held[0]  # type: ignore[index, operator]
    found = Holdings(module).objects
    assert all(id(own) in found for own in held)


def test_only_the_users_functions_have_global_names() -> None:
    assert set(globals_of(reads_a_global)) == {"SHARED", "torch"} and globals_of(nn.Linear.forward) == {}
    assert is_atom(3) and is_atom(torch.float32) and not is_atom(SHARED) and not is_atom(weakref.ref(SHARED))
