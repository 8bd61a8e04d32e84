"""What operations of torch make of tensors that are cut along a dim, or of which each rank has a part of a sum.

One table says it of each operation. What mixes the elements of several ranks' slices is refused, and so is what is not
in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fzero.base import pytree
from fzero.parallel import cuts
from fzero.parallel.cuts import Call, Mixed
from fzero.table.handle import BOTH, Function, Operands, named
from fzero.table.placements import Cut

# of several operands that are cut
_JOINT = cuts.by_shape, cuts.contracted, cuts.joined, cuts.attended, cuts.like_another, cuts.same
PARTIAL = Cut(0)  # in the place of how a tensor is cut: it is as large as the whole, and a part of a sum


def cut_behind(
    func: Function, args: Operands, kwargs: Mapping[str, Any], out: Any, cut_of: Callable[[object], Cut | None]
) -> Cut | list[Cut]:
    """How the result is cut; each of several, where these differ.

    Args:
        out: what it gave; None before it has run, which is enough for operations on each token alone (`piece`).
        cut_of: how an operand is; None where it is whole.
    """
    first: Any = out[0] if isinstance(out, (tuple, list)) and out else out
    rule = RULES.get(func)
    if rule is None or not (first is None or isinstance(first, torch.Tensor)):
        raise Mixed  # numbers of a slice
    call = rule.call(func, args, kwargs, first, cut_of)
    known = [(x, own) for x in call.flat if isinstance(x, torch.Tensor) and (own := cut_of(x)) is not None]
    if any(own == PARTIAL for _, own in known):
        return _behind_partial(rule, call, out)
    if len(known) > 1 and rule.along not in _JOINT:
        raise Mixed
    found = rule.along(call)
    if not isinstance(found, int):
        return found
    own = known[0][1]
    if any((each.outer, each.parts) != (own.outer, own.parts) for _, each in known):
        raise Mixed  # slices of other parts
    if not found:
        return PARTIAL
    if first is None:
        return own._replace(dim=found)
    before, now = known[0][0].shape[own.dim] // own.outer, first.shape[found] // own.outer
    return cuts.sized(own, before, now)._replace(dim=found)


def _behind_partial(rule: Rule, call: Call, out: object) -> Cut:
    """What comes of parts of sums; Mixed where it is something else than of the sums."""
    cuts = [call.cut_of(x) for x in call.flat if isinstance(x, torch.Tensor)]
    count = cuts.count(PARTIAL)
    if rule.sums in (LINEAR, ADDS):
        numbers = [x for name, x in call.given.items() if name != "alpha" and not isinstance(x, torch.Tensor)]
        fits = count == len(cuts) and not (rule.sums == ADDS and any(numbers))  # also numpy's
    elif rule.sums == SCALES:
        fits = count == 1 and call.given.get("bias") is None
    else:
        fits = bool(rule.sums) and call.cut_of(call.x) == PARTIAL and (rule.sums == SHAPES or count == 1)
        fits = fits and call.given.get("rounding_mode") is None
    others = any(cut not in (None, PARTIAL) for cut in cuts)
    rounded = any(isinstance(x, torch.Tensor) and not pytree.is_real(x) for x in pytree.leaves(out))
    if others or rounded or not fits:
        raise Mixed
    return PARTIAL


# what takes nothing of its operand but the shape, and gives all ranks the same values
AS_LARGE = set(named("zeros_like ones_like empty_like full_like", torch))
_DROPOUT = set(named("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout", F))
_RANDOM = {
    *(torch.dropout, F.scaled_dot_product_attention, F.rrelu, F.gumbel_softmax),
    *named("rand randn rand_like randn_like randint_like normal bernoulli multinomial", torch),
    *named("bernoulli bernoulli_ uniform_ normal_ multinomial random_ exponential_", torch.Tensor),
}


def draws(func: Function, args: Operands, kwargs: Mapping[str, object]) -> bool:
    """Tells whether a call draws random numbers."""
    if func is F.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0))
    if func in _DROPOUT:
        given = {"p": 0.5, "training": func not in (F.alpha_dropout, F.feature_alpha_dropout)}
        given |= dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
        return bool(given["p"] and given["training"])
    return func in _RANDOM


# ---- the table

# what an operation makes of parts of a sum
LINEAR = "linear"  # parts of what it makes of the sum
ADDS = "adds"  # the same of several tensors that are all parts of sums, but not of numbers
SCALES = "scales"  # the same where one operand is a part
DIVIDES = "divides"  # the same where the first one is
SHAPES = "shapes"  # the same of the first one, as the others say a shape or dtype


class Rule(NamedTuple):
    """What is known of an operation."""

    names: tuple[str, ...]  # of its arguments, in order; the last one may take all that are left
    defaults: dict[str, int | None]  # of arguments
    along: Callable[[Call], int | Cut | list[Cut]]  # the dim behind it that is cut
    sums: str  # what it makes of parts of a sum; "" where it is not known to make parts

    def call(
        self,
        func: Function,
        args: Operands,
        kwargs: Mapping[str, object],
        out: object,
        cut_of: Callable[[object], Cut | None],
    ) -> Call:
        names, in_order = self.names, args
        given: dict[str, object] = {**self.defaults, **{_SYNONYMS.get(name, name): x for name, x in kwargs.items()}}
        if names[-1].startswith("*"):
            names, rest = (*names[:-1], names[-1][1:]), args[len(names) - 1 :]
            if rest:
                in_order = (*args[: len(names) - 1], rest[0] if isinstance(rest[0], (tuple, list)) else rest)
        given |= zip(names, in_order, strict=False)
        return Call(func, *pytree.flatten((args, kwargs)), given.get(names[0]), given, out, cut_of)


_SYNONYMS = {
    **dict.fromkeys(("axis", "dims"), "dim"),
    **dict.fromkeys(("chunks", "split_size_or_sections", "split_size", "indices_or_sections", "sections"), "many"),
    **dict.fromkeys(("size", "shape"), "sizes"),
}


def _rows(
    names: str | list[Any],
    owners: Sequence[object],
    signature: str,
    along: Callable[[Call], int | Cut | list[Cut]],
    sums: str = "",
) -> dict[Function, Rule]:
    """The same rule for several operations, by their names or as they are."""
    arguments = [each.partition("=") for each in signature.split()]
    defaults = {name: None if value == "None" else int(value) for name, _, value in arguments if value}
    rule = Rule(tuple([name for name, _, _ in arguments]), defaults, along, sums)
    return dict.fromkeys(named(names, *owners) if isinstance(names, str) else names, rule)


_ELEMENTWISE = {
    **_rows("add sub subtract __add__ __radd__ __sub__ __rsub__", BOTH, "input other", cuts.by_shape, ADDS),
    **_rows("mul multiply __mul__ __rmul__", BOTH, "input other", cuts.by_shape, SCALES),
    **_rows("div divide true_divide __div__ __truediv__", BOTH, "input other", cuts.by_shape, DIVIDES),
    **_rows("neg negative __neg__ clone to float double half bfloat16", BOTH, "input", cuts.by_shape, LINEAR),
    **_rows(
        "relu gelu silu mish softplus elu selu celu leaky_relu relu6 hardtanh hardsigmoid tanh sigmoid softshrink "
        "hardshrink threshold hardswish logsigmoid softsign tanhshrink",
        *([*BOTH, F], "input", cuts.by_shape),
    ),
    **_rows(
        "abs exp exp2 log log2 log10 log1p expm1 sqrt rsqrt square sin cos tan sinh cosh asin acos atan asinh acosh "
        "atanh erf erfc reciprocal pow maximum minimum clamp clamp_min clamp_max logit where masked_fill "
        "__abs__ __pow__ __rpow__ __rdiv__ __rtruediv__ "
        "sign floor ceil round rsub lerp addcmul addcdiv nan_to_num eq ne lt le gt ge logical_and "
        "logical_or logical_not logical_xor isnan isinf isfinite type_as int long short bool trunc frac atan2 hypot "
        "xlogy erfinv remainder fmod floor_divide sgn lgamma digamma heaviside copysign bitwise_and bitwise_or "
        "bitwise_xor bitwise_not logaddexp logaddexp2 conj conj_physical __eq__ __ne__ __lt__ __le__ __gt__ __ge__ "
        "__and__ __or__ __xor__ __invert__ __mod__ __floordiv__",
        *(BOTH, "input other", cuts.by_shape),
    ),
}
ELEMENTWISE = (*_ELEMENTWISE,)  # with broadcasting, and into a new tensor


def _get(name: str) -> Function:
    return getattr(torch.Tensor, name).__get__


RULES: dict[object, Rule] = {
    **_ELEMENTWISE,
    **_rows(
        "bernoulli_ add_ mul_ sub_ div_ relu_ silu_ copy_ fill_ zero_ clamp_ exp_ tanh_ sigmoid_ "
        "masked_fill_ neg_ sqrt_ square_ pow_ __iadd__ __imul__ __isub__ __itruediv__",
        *(BOTH, "input other", cuts.by_shape),
    ),
    **_rows("expand_as", BOTH, "input other", cuts.by_shape, SHAPES),
    **_rows("dropout alpha_dropout pad", [F], "input", cuts.by_shape),
    # over dims
    **_rows("sum", BOTH, "input dim=None keepdim", cuts.contracted, LINEAR),
    **_rows("mean", BOTH, "input", cuts.by_shape, LINEAR),
    **_rows(
        "amax amin var std logsumexp max min argmax argmin prod any all median nanmean nansum count_nonzero var_mean "
        "std_mean topk kthvalue norm",
        *(BOTH, "input", cuts.by_shape),
    ),
    **_rows([torch.linalg.vector_norm], (), "input", cuts.by_shape),
    **_rows(
        "softmax log_softmax softmin cumprod argsort sort cummax cummin logcumsumexp",
        *([*BOTH, F], "input dim=None", cuts.over),
    ),
    **_rows("cumsum", BOTH, "input dim", cuts.over, LINEAR),
    **_rows([F.normalize], (), "input p dim=1", cuts.over),
    **_rows("roll", BOTH, "input shifts dim=None", cuts.over, LINEAR),
    **_rows("flip", BOTH, "input *dim", cuts.over, LINEAR),
    **_rows("tril triu", BOTH, "input", cuts.over_last, LINEAR),
    **_rows("layer_norm rms_norm", [F, torch], "input normalized_shape", cuts.over_last),
    # in other shapes and orders
    **_rows(
        "transpose swapaxes swapdims t movedim moveaxis permute unsqueeze view_as_complex view_as_real",
        *(BOTH, "input", cuts.by_shape, LINEAR),
    ),
    **_rows([_get("T"), _get("mT")], (), "input", cuts.by_shape, LINEAR),
    **_rows("reshape view", BOTH, "input *sizes", cuts.reshaped, LINEAR),
    **_rows("unflatten", BOTH, "input dim sizes", cuts.reshaped, LINEAR),
    **_rows("flatten", BOTH, "input start_dim=0 end_dim=-1", cuts.flattened, LINEAR),
    **_rows("squeeze", BOTH, "input dim=None", cuts.along, LINEAR),
    **_rows([torch.Tensor.expand, *named("broadcast_to", *BOTH)], (), "input *sizes", cuts.by_shape, LINEAR),
    **_rows("view_as reshape_as", [torch.Tensor], "input other", cuts.like_another, SHAPES),
    # in parts, and of parts
    **_rows([torch.Tensor.__getitem__], (), "input index", cuts.indexed, LINEAR),
    **_rows("chunk tensor_split", BOTH, "input many=None dim=0", cuts.taken_apart, LINEAR),
    **_rows("split unbind narrow index_select select", BOTH, "input", cuts.by_shape, LINEAR),
    **_rows([F.glu], (), "input dim=-1 many=2", cuts.gated),
    **_rows("cat concat concatenate", [torch], "tensors dim=0", cuts.joined, LINEAR),
    **_rows([torch.stack], (), "tensors", cuts.by_shape, LINEAR),
    **_rows("repeat_interleave", BOTH, "input repeats dim=None", cuts.along, LINEAR),
    # products
    **_rows([F.linear], (), "input weight bias=None", cuts.contracted, SCALES),
    **_rows("matmul __matmul__ bmm mm mv", BOTH, "input other", cuts.contracted, SCALES),
    **_rows([torch.einsum], (), "equation *operands", cuts.contracted, SCALES),
    **_rows([F.scaled_dot_product_attention], (), "query key value attn_mask=None", cuts.attended),
    # of parts of sums
    **_rows("repeat tile diagonal diagonal_scatter diff trace unfold rot90", BOTH, "input", cuts.unknown, LINEAR),
    **_rows("gather take_along_dim take outer dot inner tensordot vdot", BOTH, "input", cuts.unknown, SCALES),
    **_rows("conv1d conv2d conv3d", [F], "input weight bias=None", cuts.unknown, SCALES),
    # of the first operand alone
    **_rows([F.prelu], (), "input weight", cuts.by_shape),
    **_rows("to", [torch.Tensor], "input", cuts.same, LINEAR),
    **_rows("contiguous detach", BOTH, "input", cuts.same, LINEAR),
    **_rows([_get("data"), *named("type cpu cuda", torch.Tensor)], (), "input", cuts.same, LINEAR),
    **_rows("type_as", [torch.Tensor], "input other", cuts.same, SHAPES),
    **_rows("requires_grad_ rand_like randn_like zeros_like ones_like empty_like full_like", BOTH, "input", cuts.same),
}
