"""What a module leads to, and on which way: attributes, hooks, closures, weak references."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from fzero.modules.reach import Reach, is_atom


def test_ways_are_said_from_the_nearest_module() -> None:
    module, held, other = nn.Sequential(nn.Linear(1, 1)), torch.ones(3), torch.ones(2)
    module[0].note = {"x": [held]}  # type: ignore[assignment]
    module[0].register_forward_hook(lambda *_: other)
    reach = Reach(module)
    assert reach.way(id(held)) == "submodule '0', attribute 'note', entry 'x', item 0"
    assert "closure variable 'other'" in reach.way(id(other)) and "forward hook" in reach.way(id(other))
    assert id(held) in reach.owned and id(other) not in reach.owned  # what only a hook holds
    assert id(module) in reach.reaching({id(held)}) and id(held) not in reach.reaching({id(other)})


def test_what_refers_weakly_leads_there_too() -> None:
    module, other = nn.Linear(1, 1), nn.Linear(1, 1)
    module.ref = weakref.ref(other)  # type: ignore[assignment]
    assert id(other) in Reach(module).objects
    assert is_atom(3) and is_atom(torch.float32) and not is_atom(other) and not is_atom(module.ref)
