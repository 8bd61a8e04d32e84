"""In-place operations: on inputs, outputs and activations of units, on what aliases them, and on leaves."""

from __future__ import annotations

from drawn.language import feature
from drawn.write import Writer


@feature("in-place on a unit's input, inside it", remedy=True)
def on_input(c: Writer) -> None:
    a, form, later = c.name("a"), c.number(4), c.number(2)
    change = ["h.mul_(1.5)", "h += 0.3", "h[:, 1:] = h[:, 1:] * 0.5", "h.clamp_(-1.0, 1.0)"][form]
    then = f"h + {c.change()}"
    if c.remedied:
        block = c.unit("h", "h = h.clone()", change, f"return {then}, h")
        c.do(f"{a} = h * 1.1", f"h, {a} = {c.call(block, a)}")
    else:
        block = c.impure("h", change, f"return {then}")
        c.do(f"{a} = h * 1.1", f"h = {c.call(block, a)}")
    c.do(f"del {a}" if later else f"h = h + 0.1 * {a}")


@feature("in-place on a unit's output, outside it", remedy=True)
def on_output(c: Writer) -> None:
    a, form = c.name("a"), c.number(4)
    new = [f"{a} * 1.5", f"{a} + 0.3", f"torch.cat([{a}[:, :1], {a}[:, 1:] * 0.5], 1)", f"{a} + 0.1 * h"][form]
    change = [f"{a}.mul_(1.5)", f"{a} += 0.3", f"{a}[:, 1:] = {a}[:, 1:] * 0.5", f"{a}.add_(h, alpha=0.1)"][form]
    c.do(f"{a} = {c.call(c.plain(), 'h')}", f"{a} = {new}" if c.remedied else change, f"h = {a}")


@feature("in-place on an activation, inside a unit")
def activation_inside(c: Writer) -> None:
    w, b, _ = c.own()
    c.inside_one(
        f"t = h @ {w}\nt.tanh_()\nh = h + 0.1 * t",
        f"t = h @ {w}\nt += {b}\nt.relu_()\nh = h + 0.1 * t",
        f"t = torch.zeros_like(h)\nt += {b}\nh = h + 0.1 * t",
        f"t = h * {b}\nt[..., 0].mul_(2.0)\nh = h + 0.1 * t",
        f"t = torch.empty_like(h).copy_(h @ {w})\nh = h + 0.1 * t",
    )


@feature("in-place on an activation, outside")
def activation_outside(c: Writer) -> None:
    a = c.name("a")
    change = c.pick(f"{a}.tanh_()", f"{a} += {c.root('g')}", f"{a}.sub_(0.1).mul_(0.9)", f"{a}.add_(h).relu_()")
    c.do(f"{a} = h * 1.2", change, f"h = 0.5 * h + 0.5 * {a}")


@feature("nn.ReLU(inplace=True) at the beginning of a unit", remedy=True)
def relu(c: Writer) -> None:
    a, later = c.name("a"), c.number(2)
    then = f"h + {c.change()}"
    if c.remedied:
        block = c.unit("h", "h = F.relu(h)", f"return {then}, h")
        c.do(f"{a} = h + 0.3", f"h, {a} = {c.call(block, a)}")
    else:
        init = [] if c.pure else ["self.relu = nn.ReLU(inplace=True)"]
        own = "nn.ReLU(inplace=True)" if c.pure else "self.relu"
        block = c.impure("h", f"h = {own}(h)", f"return {then}", init=init)
        c.do(f"{a} = h + 0.3", f"h = {c.call(block, a)}")
    c.do(f"del {a}" if later else f"h = h + 0.1 * {a}")


@feature("x[i] = ...", rows=False)
def setitem(c: Writer) -> None:
    a, block = c.name("a"), c.plain()
    w, _, _ = c.own()
    if c.number(3) == 0:
        one, other = "t = h.clone()\nt[..., 0] = 0.5\nh = t", f"t = h @ {w}\nt[..., 1:3] = h[..., :2]\nh = h + 0.1 * t"
        c.inside(block, c.pick(one, other))
    else:
        g = c.root("g")
        change = c.pick("[0] = 0.5", f"[1] = {c.call(block, 'h')}[2]", f"[:, 2] = {g}[0]", "[k % 2 == 0] = 0.1")
        c.do(f"{a} = h.clone()", a + change, f"h = {a}")


@feature("a unit that returns its input, changed outside", remedy=True)
def returned(c: Writer) -> None:
    a, r, form = c.name("a"), c.name("r"), c.number(2)
    _, b, _ = c.own()
    block = c.unit("h", f"return h, h + 0.1 * {b}") if form else c.unit("h", "return h")
    c.do(f"{a} = h * 1.1")
    c.do(f"{r}, h = {c.call(block, a)}" if form else f"{r} = {c.call(block, a)}")
    change = c.pick("mul 2.0", "add 0.5").split()
    if c.remedied:
        c.do(f"{r} = {a} = torch.{change[0]}({r}, {change[1]})")
    else:
        c.do(f"{r}.{change[0]}_({change[1]})")
    c.do(f"h = 0.5 * h + 0.3 * {r} + 0.2 * {a}")


@feature("a unit that returns a view of its input, changed outside", remedy=True)
def viewed(c: Writer) -> None:
    a, r, form = c.name("a"), c.name("r"), c.number(3)
    block = c.unit("h", ["return h.view(-1)", "return h[:, :2]", "return h.T"][form])
    c.do(f"{a} = h * 1.1", f"{r} = {c.call(block, a)}")
    if c.remedied:
        back = [f"{r}.view_as({a})", f"torch.cat([{r}, {a}[:, 2:]], 1)", f"{r}.T"][form]
        c.do(f"{r} = {r} * 2.0", f"{a} = {back}")
    else:
        c.do(f"{r}.mul_(2.0)")
    c.do(f"h = 0.5 * h + 0.5 * {a}" + (f" + 0.1 * {r}.mean(1, keepdim=True)" if form == 1 else ""))


@feature("in-place on a leaf", rows=False, nests=False, remedy=True)
def on_leaf(c: Writer) -> None:
    """On a copy of it, or on itself without gradient: its value is another one from then on, its gradient stays."""
    w, b, _ = c.own()
    form, a = c.number(4), c.name("a")
    if form == 0:
        c.inside(c.plain(), f"t = {w}.clone()\nt.mul_(0.5)\nh = h + 0.1 * torch.tanh(h @ t)")
    elif form == 1:
        c.do(f"{a} = {c.root('g')}.clone()", f"{a}[0] = 1.0", f"h = h + 0.1 * {a}")
    elif form == 2:
        change = f"b = {b} - 0.1 * {b}.detach()" if c.remedied else f"with torch.no_grad():\n    {b}.mul_(0.9)"
        c.run("h", change, f"return h + 0.3 * torch.tanh(h @ {w} + {'b' if c.remedied else b})")
    else:
        g = c.root("g")
        if c.remedied:
            c.do(f"g = {g} - 0.1 * {g}.detach()")
            c.renamed["g"] = "g"
        else:
            c.do(f"with torch.no_grad():\n    {g}.mul_(0.9)")
        c.do(f"h = h + 0.1 * {c.root('g')}")
