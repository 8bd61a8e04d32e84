"""Products have the bits of those of torch's graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fzero.base.hooks import is_hooked
from fzero.engine import halves as products
from fzero.engine.halves import Later
from fzero.testing import assert_trees_equal


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    drawn = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=drawn).to(dtype).requires_grad_()


def by_columns(x: torch.Tensor) -> torch.Tensor:
    return x.detach().mT.contiguous().mT.requires_grad_()


NODES: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "mm": lambda t: draw(5, 7, dtype=t) @ draw(7, 3, dtype=t),
    "mm, by columns": lambda t: by_columns(draw(5, 7, dtype=t)) @ by_columns(draw(7, 3, dtype=t)),
    "linear": lambda t: F.linear(draw(5, 7, dtype=t), draw(3, 7, dtype=t), draw(3, dtype=t)),
    "addmm": lambda t: torch.addmm(draw(1, dtype=t), draw(5, 7, dtype=t), draw(7, 3, dtype=t), beta=3),
    "one column": lambda t: draw(5, 1, dtype=t) @ draw(1, 3, dtype=t),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("name", NODES)
def test_what_a_node_hands_on(name: str, dtype: torch.dtype) -> None:
    out = NODES[name](dtype)
    node, grad = out.grad_fn, torch.cos(out.detach() * 3)
    assert node is not None
    seen: list[torch.Tensor] = []
    handle = node.register_hook(lambda given, _: seen.extend(given))
    out.backward(grad, retain_graph=True)
    handle.remove()
    places = [k for k in range(len(seen)) if products.is_product(node, k)]
    assert len(places) == 2
    for k in places:
        product = products.product_of(node, k, False, dtype)(grad)
        assert_trees_equal(product.value(), seen[k])
        assert_trees_equal(products.product_of(node, k, True, dtype)(grad).value(), seen[k].t())
        assert_trees_equal(Later(product).now().value(), seen[k])


def test_a_product_times_a_number_is_none() -> None:
    node = torch.addmm(draw(1), draw(5, 7), draw(7, 3), alpha=0.5).grad_fn
    assert node is not None and not any(products.is_product(node, k) for k in range(3))


def test_what_waits_must_stay_as_it_was_and_leads_to_no_graph() -> None:
    hidden = draw(3, 4) * 2
    grad, node = torch.ones(3, 2), (hidden @ draw(4, 2)).grad_fn
    assert node is not None
    for written in (hidden.detach(), grad):
        later = Later(products.product_of(node, 1, False, torch.float32)(grad))
        assert all(x.grad_fn is None and x._base is None and not x.requires_grad for x in later.product[:2])
        written.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            later.now()
        written.sub_(1)
        hidden = draw(3, 4) * 2
        node = (hidden @ draw(4, 2)).grad_fn
        assert node is not None


def test_hooks_of_what_is_saved() -> None:
    for hooked in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) if hooked else contextlib.nullcontext():
            node = (draw(3, 4) @ draw(4, 2)).grad_fn
        assert node is not None and is_hooked(node) is hooked
