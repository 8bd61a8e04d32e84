"""Nodes' cotangents along single edges, and later, against those that torch hands on along all of them at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import Node

from fzero.base import edges
from fzero.testing import assert_trees_equal

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex64)
Tensors = list[torch.Tensor]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 100 * len(shape) + sum(shape))
    drawn = torch.complex128 if dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=drawn).to(dtype).requires_grad_()


def pulled(out: torch.Tensor) -> tuple[Node, torch.Tensor, list[torch.Tensor | None]]:
    """A node, a cotangent of its output, and what it hands on along every edge."""
    node, grad = out.grad_fn, torch.cos(out.detach() * 3)
    assert node is not None
    seen: list[list[torch.Tensor | None]] = []
    handle = node.register_hook(lambda given, _: seen.append(list(given)))
    leaves = [edges.edge_of(node, k) for k, (other, _) in enumerate(node.next_functions) if other is not None]
    torch.autograd.grad(out, [torch.autograd.graph.GradientEdge(*e) for e in leaves], grad, retain_graph=True)
    handle.remove()
    return node, grad, seen[0]


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.detach().mT.contiguous().mT.requires_grad_()


PRODUCTS: dict[str, Callable[[torch.dtype], torch.Tensor]] = {
    "mm": lambda t: draw(5, 7, dtype=t) @ draw(7, 3, dtype=t),
    "mm, by columns": lambda t: transposed(draw(5, 7, dtype=t)) @ transposed(draw(7, 3, dtype=t)),
    "linear": lambda t: F.linear(draw(5, 7, dtype=t), draw(3, 7, dtype=t), draw(3, dtype=t)),
    "addmm": lambda t: torch.addmm(draw(1, dtype=t), draw(5, 7, dtype=t), draw(7, 3, dtype=t), beta=3, alpha=0.5),
    "one column": lambda t: draw(5, 1, dtype=t) @ draw(1, 3, dtype=t),
    "bmm": lambda t: torch.bmm(draw(2, 5, 7, dtype=t), draw(2, 7, 3, dtype=t)),
    "baddbmm": lambda t: torch.baddbmm(
        draw(5, 1, dtype=t), draw(2, 5, 7, dtype=t), draw(2, 7, 3, dtype=t), beta=2, alpha=3
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_what_a_product_hands_on_later(name: str, dtype: torch.dtype) -> None:
    node, grad, want = pulled(PRODUCTS[name](dtype))
    places = range(len(want))
    for chosen in ([k] for k in places), [places]:
        for own in chosen:
            kept = edges.Kept(node, grad, own)
            for k in own:
                assert_trees_equal(kept.give(k), want[k])
            assert kept.grad is None


CONVOLUTIONS: dict[str, Callable[[], torch.Tensor]] = {
    "1d": lambda: F.conv1d(draw(2, 4, 9), draw(6, 4, 3), draw(6)),
    "2d": lambda: F.conv2d(draw(2, 4, 9, 8), draw(6, 2, 3, 3), draw(6), stride=2, padding=1, groups=2),
    "transposed": lambda: F.conv_transpose2d(draw(2, 4, 5, 5), draw(4, 3, 3, 3), draw(3), stride=2, output_padding=1),
    "channels last": lambda: F.conv2d(
        draw(2, 4, 9, 8).detach().contiguous(memory_format=torch.channels_last).requires_grad_(), draw(6, 4, 3, 3)
    ),
    "double": lambda: F.conv2d(draw(2, 4, 9, 8, dtype=torch.float64), draw(6, 4, 3, 3, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_needs_no_values_of_its_weight(name: str) -> None:
    out = CONVOLUTIONS[name]()
    node, grad, want = pulled(out)
    places = [k for k in (1, 2) if want[k] is not None]
    assert_trees_equal(edges.along(node, (grad,), [0])[0], want[0])
    kept = edges.Kept(node, grad, places)
    del out
    for k in places:
        assert_trees_equal(kept.give(k), want[k])


MANY: dict[str, Callable[[], torch.Tensor]] = {
    **{name: lambda make=make: make(torch.float32) for name, make in PRODUCTS.items()},
    **CONVOLUTIONS,
    "add": lambda: torch.add(draw(4, 5), draw(5), alpha=3),
    "sub": lambda: torch.sub(draw(4, 5), draw(4, 1), alpha=0.3),
    "mul": lambda: draw(4, 5) * draw(5),
    "div": lambda: draw(4, 5) / draw(5),
    "dtypes": lambda: draw(4, 5) * draw(5, dtype=torch.float64),
    "complex": lambda: draw(4, 5, dtype=torch.complex64) * draw(5),
    "mv": lambda: draw(4, 5) @ draw(5),
    "dot": lambda: draw(5) @ draw(5, seed=1),
    "cat": lambda: torch.cat([draw(4, 5), draw(2, 5)]),
    "stack": lambda: torch.stack([draw(4, 5), draw(4, 5, seed=1)]),
    "where": lambda: torch.where(draw(4, 5) > 0, draw(4, 5, seed=1), draw(5)),
    "addcmul": lambda: torch.addcmul(draw(4, 5), draw(5), draw(4, 5, seed=1), value=0.5),
    "addcdiv": lambda: torch.addcdiv(draw(4, 5), draw(5), draw(4, 5, seed=1), value=0.5),
    "maximum": lambda: torch.maximum(draw(4, 5), draw(5)),
    "minimum": lambda: torch.minimum(draw(4, 5), draw(5)),
    "index_put": lambda: draw(4, 5).clone().index_put((torch.tensor([0, 2]),), draw(2, 5)),
    "masked_scatter": lambda: draw(4, 5).clone().masked_scatter(torch.eye(4, 5) > 0, draw(4, seed=1)),
    "layer norm": lambda: F.layer_norm(draw(64, 33), [33], draw(33), draw(33, seed=1)),
    "group norm": lambda: F.group_norm(draw(4, 6, 7), 2, draw(6), draw(6, seed=1)),
    "batch norm": lambda: F.batch_norm(draw(4, 6, 7), None, None, draw(6), draw(6, seed=1), training=True),
    "batch norm, evaluated": lambda: F.batch_norm(
        draw(4, 6, 7), torch.zeros(6), torch.ones(6), draw(6), draw(6, seed=1), training=False
    ),
}


@pytest.mark.parametrize("name", MANY)
def test_edges_apart(name: str) -> None:
    node, grad, want = pulled(MANY[name]())
    assert edges.name_of(node) in edges.SEPARABLE and not edges.is_python(node)
    rest = [None] * (len(node._input_metadata) - 1)  # cotangents of further outputs
    for k, value in enumerate(want):
        if node.next_functions[k][0] is not None:
            assert_trees_equal(edges.along(node, (grad, *rest), [k])[k], value)
    assert edges.along(node, (None, *rest), [0]) == {0: None}


def test_every_separable_node_is_tried() -> None:
    tried = {edges.name_of(pulled(make())[0]) for make in MANY.values()}
    assert edges.SEPARABLE - tried <= {"AddmvBackward0"}


def test_hooks_of_what_is_saved() -> None:
    x, w = draw(3, 4), draw(4, 2)
    node = (x @ w).grad_fn
    assert node is not None and not edges.is_hooked(node)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        node = (x @ w).grad_fn
    assert node is not None and edges.is_hooked(node)


def test_what_is_kept_for_later_must_stay_as_it_was() -> None:
    x = draw(3, 4)
    hidden = x * 2
    node, grad, _ = pulled(hidden @ draw(4, 2))
    kept = edges.Kept(node, grad, [1])
    hidden.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.give(1)


def test_what_is_kept_for_later_leads_to_no_graph() -> None:
    x = draw(3, 4)
    node, grad, _ = pulled(torch.tanh(x) @ draw(4, 2))
    kept = edges.Kept(node, grad, [0, 1])
    assert all(saved.grad_fn is None and not saved.requires_grad for saved in kept._saved)
