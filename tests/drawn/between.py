"""What comes between a unit and its derivative: hooks of tensors, modes, checkpoints, an `except` for everything."""

from __future__ import annotations

from drawn.language import feature
from drawn.write import Writer


@feature("a hook on a tensor", rows=False, nests=False)
def tensor_hook(c: Writer) -> None:
    """That changes the cotangent, or keeps what the next step reads."""
    form, seen = c.number(3), c.name("seen")
    if form == 0:
        change = "if v.requires_grad:\n    v.register_hook(lambda g: 0.5 * g)"
        return c.run("h", f"v = {c.change()}", change, "return h + v")
    c.top.append(f"{seen} = Config([])")
    keep = f"if v.requires_grad:\n    v.register_hook(lambda g: {seen}.scale.append(0.1 if g is not None else 0.0))"
    factor = f"(1 + 0.1 * min(len({seen}.scale), 5))"
    if form == 1:
        block = c.unit("h", f"v = {c.change()}", keep, "return h + v")
        c.do(f"h = {c.call(block, 'h')} * {factor}")
    else:  # of what a unit puts out
        block = c.unit("h", f"return {c.change()}")
        c.do(f"v = {c.call(block, 'h')}", keep, f"h = h + v * {factor}")


@feature("a function mode around a call")
def function_mode(c: Writer) -> None:
    form = c.number(3)
    block = c.unit("h", f"return h + {c.change()}")
    if form == 0:
        c.do("with Doubling():", f"    h = {c.call(block, 'h')}")
    elif form == 1:  # and without
        c.do("with Doubling():", f"    h = {c.call(block, 'h')}", f"h = {c.call(block, 'h')}")
    else:
        inner = c.unit("h", "with Doubling():", f"    v = {c.change()}", "return h + v")
        c.do(f"h = {c.call(inner, 'h')}", "with Doubling():", f"    h = {c.call(block, 'h')}")


@feature("an except that takes everything", remedy=True)
def takes_everything(c: Writer) -> None:
    form, held = c.number(4), c.name("held")
    taken = ["except Exception:", "except:"][c.number(2)]
    given = ["torch.sin(h)", c.root("g") if c.pure else "self.g * 1.0"][c.number(2)]
    if form == 3:  # of its own making
        own = "v = h @ torch.zeros(7, 2, dtype=F64)"
        return c.run("h", "try:", f"    {own}", taken, f"    v = {c.change()}", "return h + v")
    if c.remedied:
        read = ["held * 1.0", "torch.cos(held)", "held.sum(-1, keepdim=True)"][form]
        return c.run("h, held", f"return h + {c.change()} * {read}", given=f"h, {given}")
    c.top.append(f"{held} = Config(None)")
    read = [f"{held}.scale * 1.0", f"torch.cos({held}.scale)", f"{held}.scale.sum(-1, keepdim=True)"][form]
    lines = ["try:", f"    v = {read}", taken, "    v = 2.0", f"return h + {c.change()} * v"]
    block = c.impure("h", *lines, captured=True)
    c.do(f"{held}.scale = {given}", f"h = {c.call(block, 'h')}", f"{held}.scale = None")


@feature("an embedding with sparse gradients", nests=False, weight=1.5)
def sparse(c: Writer) -> None:
    form = c.number(3)
    table = 'q["table"]' if c.pure else "self.table"
    found = f"F.embedding(k % 3, {table}, sparse=True)"
    used = [found, f"{found} * {table}.sum(0)", f"{found} + 0.1 * {found}.sin()"][form]  # the first is its only use
    c.run("h, k", f"return h + {used} + {c.change()}", table="3, 4")


@feature("a checkpoint around a unit", kinds="pure", checkpoints=True, weight=1.8, remedy=True)
def around_unit(c: Writer) -> None:
    """Refused: fz.remat recomputes units."""
    block = c.unit("h", f"return h + {c.change()}")
    if c.remedied or c.number(12):
        c.do(f"h = {c.call(block, 'h')}")
    else:
        c.do(f"h = checkpoint(lambda h: {c.call(block, 'h')}, h, use_reentrant=False)")
