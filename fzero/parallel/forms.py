"""What a varying value is to the other ranks' values: the same (replicated), a piece along a dim, or a partial sum.

Operators that are one process's, done on pieces, are known here; what others make is unknown, and nothing is said of
it. Of a partial value only sums are right: a piece or a replicated value added to it is added as often as ranks are,
and a function of it that is not linear gives no summand of what it gives of the sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

REPLICATED, PARTIAL, CONSTANT = "replicated", "partial", "constant"
Form = int | str | None  # the dim of a piece, one of these words, or unknown
BENT = frozenset(
    "abs acos acosh asin asinh atan atanh celu clamp clamp_max clamp_min cos cosh elu erf erfc exp exp2 expm1 gelu "
    "hardshrink hardsigmoid hardtanh leaky_relu log log10 log1p log2 logit maximum minimum mish pow reciprocal relu "
    "relu6 rsqrt selu sigmoid silu sin sinc sinh softplus softshrink sqrt square tan tanh threshold".split()
)  # elementwise operators that are not linear
Given = dict[str, Any]  # an operator's arguments by name
FormOf = Callable[[torch.Tensor], Form]


class Clash(NamedTuple):
    """An operator that adds to a partial value what is not, or, where there is no other one, that is no sum of it."""

    partial: torch.Tensor
    other: torch.Tensor | None = None


def form_made(func: Any, args: Sequence[object], kwargs: Given, form: FormOf, out: object) -> Form | Clash:
    """The form of what an operator makes of operands of some forms; of all that it makes."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None
    given: Given = dict(zip([each.name for each in schema.arguments], args, strict=False), **kwargs)
    name = schema.name.rpartition("::")[2]
    rule = _RULES.get(name)
    if rule is not None:
        return rule(given, form, out)
    return _pointwise(name, given, form) if torch.Tag.pointwise in func.tags else None


def _tensors(given: Given) -> list[torch.Tensor]:
    return [each for each in given.values() if isinstance(each, torch.Tensor)]


def _is_whole(form: Form) -> bool:
    """Tells whether every rank has all of a value."""
    return form in (REPLICATED, CONSTANT)


def _is_piece(form: Form) -> bool:
    return isinstance(form, int)


# ---- one element after the other


def _pointwise(name: str, given: Given, form: FormOf) -> Form | Clash:
    tensors = _tensors(given)
    forms = [form(each) for each in tensors]
    if None in forms:
        return None
    if PARTIAL in forms:
        return _of_partial(name.rstrip("_"), given, tensors, forms)
    from_back = {each - x.ndim for x, each in zip(tensors, forms, strict=True) if isinstance(each, int)}
    if from_back:
        return max(x.ndim for x in tensors) + from_back.pop() if len(from_back) == 1 else None
    numbers = [each for each in given.values() if isinstance(each, (int, float)) and not isinstance(each, bool)]
    scaled = bool(numbers)  # by what may depend on the rank
    return None if scaled or CONSTANT in forms else REPLICATED


def _of_partial(name: str, given: Given, tensors: list[torch.Tensor], forms: list[Form]) -> Form | Clash:
    """Sums of partial values are, and so is one that is scaled by what is the same on all ranks."""
    if name in ("add", "sub", "rsub"):
        for x, each in zip(tensors, forms, strict=True):
            if _is_piece(each) or each == REPLICATED:
                return Clash(tensors[forms.index(PARTIAL)], x)
        return PARTIAL if len(tensors) > 1 and set(forms) == {PARTIAL} else None
    if name == "mul" or (name in ("div", "neg") and forms[0] == PARTIAL):
        scaled = [each for each in forms if each != PARTIAL]
        if len(forms) - len(scaled) > 1:
            return Clash(tensors[0])
        return PARTIAL if all(map(_is_whole, scaled)) else None
    return Clash(tensors[forms.index(PARTIAL)]) if name in BENT or name == "div" else None


# ---- products


def _product(given: Given, form: FormOf, out: object) -> Form | Clash:
    a, b = _tensors(given)
    return _contracted(a, b, form)


def _contracted(a: torch.Tensor, b: torch.Tensor, form: FormOf) -> Form:
    """a [..., m, k] times b [..., k, n]; either may be a vector."""
    left, right = form(a), form(b)
    if left is None or right is None:
        return None
    inner = (a.ndim - 1, max(b.ndim - 2, 0))
    if (left, right) == inner:
        return PARTIAL
    if _is_whole(left) and _is_whole(right):
        return REPLICATED if left == right else None
    if PARTIAL in (left, right):
        return PARTIAL if _is_whole(left) or _is_whole(right) else None
    if _is_whole(right) and left != inner[0]:
        return left
    if _is_whole(left) and right != inner[1]:
        return right
    return left if left == right and a.ndim == b.ndim == 3 and left == 0 else None


def _product_and_bias(given: Given, form: FormOf, out: object) -> Form | Clash:
    added, a, b = _tensors(given)
    product, bias = _contracted(a, b, form), form(added)
    if product == PARTIAL:
        clashes = bias == REPLICATED or _is_piece(bias)
        return Clash(a, added) if clashes else PARTIAL if bias == PARTIAL else None
    if isinstance(product, int):
        aligned = isinstance(bias, int) and bias - added.ndim == product - a.ndim
        return product if _is_whole(bias) or aligned else None
    return REPLICATED if product == bias == REPLICATED else None


# ---- views


def _kept(given: Given, form: FormOf, out: object) -> Form:
    return form(given["self"])


def _permuted(order: Callable[[Given, int], Sequence[int]]) -> Callable[..., Form]:
    def rule(given: Given, form: FormOf, out: object) -> Form:
        own, ndim = form(given["self"]), given["self"].ndim
        return [each % ndim for each in order(given, ndim)].index(own) if isinstance(own, int) else own

    return rule


def _exchanged(given: Given, ndim: int) -> list[int]:
    order, a, b = list(range(ndim)), given["dim0"], given["dim1"]
    order[a], order[b] = order[b], order[a]
    return order


def _unsqueezed(given: Given, form: FormOf, out: object) -> Form:
    own = form(given["self"])
    return own + (given["dim"] % (given["self"].ndim + 1) <= own) if isinstance(own, int) else own


def _reshaped(given: Given, form: FormOf, out: object) -> Form:
    """Where a dim is cut up or joined, what is cut must be its slowest part."""
    own, x = form(given["self"]), given["self"]
    if not isinstance(own, int) or not isinstance(out, torch.Tensor):
        return own
    if x.numel() == 0:
        return None
    before = x.shape[:own].numel()
    counts = [1, *itertools.accumulate(out.shape, lambda total, size: total * size)]
    places = [i for i, count in enumerate(counts[:-1]) if count == before and out.shape[i] != 1]
    if not places or x.shape[own] == 1:
        return own if x.shape == out.shape else None
    size, rest = out.shape[places[0]], x.shape[own]
    return places[0] if size % rest == 0 or rest % size == 0 else None


def _expanded(given: Given, form: FormOf, out: Any) -> Form:
    own = form(given["self"])
    return own + out.ndim - given["self"].ndim if isinstance(own, int) else own


def _sliced(given: Given, form: FormOf, out: Any) -> Form:
    """A part along a dim, or the parts; which one may depend on the rank."""
    own, x = form(given["self"]), given["self"]
    dim, parts = given.get("dim", 0) % x.ndim, out if isinstance(out, (list, tuple)) else [out]
    if isinstance(own, int):
        fewer = bool(parts) and parts[0].ndim < x.ndim
        if dim == own:
            return own if len(parts) == 1 and parts[0].shape == x.shape else None
        return own - (fewer and dim < own)
    return own if own == PARTIAL or (len(parts) == 1 and parts[0].shape == x.shape) else None


def _joined(given: Given, form: FormOf, out: object) -> Form:
    tensors, dim = given["tensors"], given.get("dim", 0)
    forms = {form(each) for each in tensors}
    if len(forms) > 1:
        return None
    own = forms.pop()
    return None if own == CONSTANT or own == dim % tensors[0].ndim else own


# ---- along a dim


def _reduced(given: Given, form: FormOf, out: Any, adds: bool = False) -> Form:
    own, x = form(given["self"]), given["self"]
    if "other" in given:
        return None
    dims = given.get("dim")
    dims = range(x.ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {each % x.ndim for each in dims} if x.ndim else set()
    if own == PARTIAL:
        return PARTIAL if adds else None
    if not isinstance(own, int):
        return own
    if own in gone:
        return PARTIAL if adds else None
    return own if given.get("keepdim") else own - len([each for each in gone if each < own])


def _added(given: Given, form: FormOf, out: Any) -> Form:
    return _reduced(given, form, out, adds=True)


def _averaged(given: Given, form: FormOf, out: Any) -> Form:
    own = form(given["self"])
    return own if own == PARTIAL else _reduced(given, form, out)


def _bent(given: Given, form: FormOf, out: Any) -> Form | Clash:
    x = given["self"]
    return Clash(x) if form(x) == PARTIAL else _reduced(given, form, out)


def _normalized(dims: Callable[[Given, int], Sequence[int]]) -> Callable[..., Form | Clash]:
    """Whatever looks along dims: a softmax, a norm with its weights."""

    def rule(given: Given, form: FormOf, out: object) -> Form | Clash:
        x, *weights = _tensors(given)
        own = form(x)
        if own == PARTIAL:
            return Clash(x)
        if not all(_is_whole(form(each)) for each in weights):
            return None
        return None if own in [each % x.ndim for each in dims(given, x.ndim)] else own

    return rule


def _running(given: Given, form: FormOf, out: object) -> Form:
    own, x = form(given["self"]), given["self"]
    return None if own == given["dim"] % max(x.ndim, 1) else own


def _embedded(given: Given, form: FormOf, out: Any) -> Form:
    table, places = form(given["weight"]), form(given["indices"])
    if _is_whole(table) and isinstance(places, int):
        return places
    return out.ndim - 1 if table == 1 and _is_whole(places) else None


def _attended(given: Given, form: FormOf, out: object) -> Form | Clash:
    forms = {form(given[name]) for name in ("query", "key", "value")}
    for name in ("query", "key"):
        if form(given[name]) == PARTIAL:
            return Clash(given[name])
    own = forms.pop() if len(forms) == 1 else None
    return own if own in (0, 1, REPLICATED) and given.get("attn_mask") is None else None


_RULES: dict[str, Callable[[Given, FormOf, Any], Form | Clash]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), _product),
    **dict.fromkeys(("addmm", "baddbmm"), _product_and_bias),
    **dict.fromkeys(("clone", "_to_copy", "detach", "alias", "contiguous", "lift_fresh"), _kept),
    "t": _permuted(lambda given, ndim: range(ndim)[::-1]),
    "transpose": _permuted(_exchanged),
    "permute": _permuted(lambda given, ndim: given["dims"]),
    "unsqueeze": _unsqueezed,
    **dict.fromkeys(("view", "_unsafe_view", "_reshape_alias", "squeeze"), _reshaped),
    "expand": _expanded,
    **dict.fromkeys(("slice", "select", "split", "split_with_sizes", "unbind"), _sliced),
    "cat": _joined,
    "sum": _added,
    "mean": _averaged,
    **dict.fromkeys(("argmax", "argmin"), _reduced),
    **dict.fromkeys(("amax", "amin", "max", "min", "logsumexp", "var", "std"), _bent),
    **dict.fromkeys(("_softmax", "_log_softmax"), _normalized(lambda given, ndim: [given["dim"]])),
    "cumsum": _running,
    "native_layer_norm": _normalized(lambda given, ndim: range(ndim - len(given["normalized_shape"]), ndim)),
    "embedding": _embedded,
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_efficient_attention",
        ),
        _attended,
    ),
}
