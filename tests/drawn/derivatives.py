"""Derivatives inside the function: by torch.func and by torch.autograd, through units, between them and inside one."""

from __future__ import annotations

from drawn.language import feature
from drawn.write import Writer


def _place(c: Writer, text: str) -> None:
    """`text` uses {f}, a function of one activation: a call of a unit, or an expression within one."""
    block = c.plain()
    if c.number(3):
        c.do(text.format(f=c.call(block, "z")))
    else:
        w, b, _ = c.own()
        c.inside(block, text.format(f=f"torch.tanh(z @ {w} + {b})"))


@feature("torch.func.grad inside")
def grad(c: Writer) -> None:
    _place(c, "h = h + 0.1 * torch.func.grad(lambda z: {f}.square().sum())(h)")


@feature("torch.func.vjp inside")
def vjp(c: Writer) -> None:
    out, pull = c.name("out"), c.name("pull")
    _place(c, f"{out}, {pull} = torch.func.vjp(lambda z: {{f}}, h)\nh = h + 0.1 * {pull}(torch.cos({out}))[0]")


@feature("torch.func.jvp inside")
def jvp(c: Writer) -> None:
    out, moved = c.name("out"), c.name("moved")
    _place(c, f"{out}, {moved} = torch.func.jvp(lambda z: {{f}}, (h,), (torch.sin(h),))\nh = {out} + 0.1 * {moved}")


@feature("torch.func.vmap inside")
def vmap(c: Writer) -> None:
    _place(c, "h = 0.5 * h + 0.5 * torch.func.vmap(lambda z: {f})(h)")


@feature("torch.func.hessian inside")
def hessian(c: Writer) -> None:
    name = c.name("hess")
    _place(
        c,
        f"{name} = torch.func.vmap(torch.func.hessian(lambda z: {{f}}.sum()))(h)\n"
        f"h = h + 0.1 * torch.einsum('bij,bj->bi', {name}, h)",
    )


@feature("a gradient penalty")
def penalty(c: Writer) -> None:
    block, of = c.plain(), c.pick("x", "h")
    name = c.name("gx")
    c.do(
        f"{name} = torch.func.grad(lambda z: {c.call(block, 'z')}.sum())({of})",
        f"total = total + 0.1 * (({name}.square().sum(-1) + 1e-3).sqrt() - 1).square().mean()",
    )


WANTED = "z{i} = h if h.requires_grad else h.detach().requires_grad_()"


@feature("autograd.grad with create_graph")
def forces(c: Writer) -> None:
    """Energy to forces, as force fields write it; also where nothing else differentiates."""
    i, block, form = c._index, c.plain(), c.number(3)
    w, b, _ = c.own()
    if form == 2:
        c.inside(
            block,
            "with torch.enable_grad():",
            "    z = h if h.requires_grad else h.detach().requires_grad_()",
            f"    f, = torch.autograd.grad(torch.tanh(z @ {w} + {b}).sum(), z, create_graph=True)",
            "h = h - 0.1 * f",
        )
        return
    c.do(
        "with torch.enable_grad():",
        f"    {WANTED.format(i=i)}",
        f"    e{i} = {c.call(block, f'z{i}')}",
        f"    f{i}, = torch.autograd.grad(e{i}.square().sum(), z{i}, create_graph=True)",
        [f"h = h - 0.1 * f{i}", f"h = e{i} + 0.1 * f{i}"][form],
    )


@feature("autograd.grad without create_graph", nests=False)
def langevin(c: Writer) -> None:
    """A pullback in the middle of a forward: a score, a step of Langevin dynamics."""
    i, block, form = c._index, c.plain(), c.number(3)
    w, b, _ = c.own()
    if form == 2:
        c.inside(
            block,
            "with torch.enable_grad():",
            "    z = h if h.requires_grad else h.detach().requires_grad_()",
            f"    f, = torch.autograd.grad(torch.tanh(z @ {w} + {b}).sum(), z, retain_graph=True)",
            "h = h - 0.1 * f",
        )
        return
    c.do(
        "with torch.enable_grad():",
        f"    {WANTED.format(i=i)}",
        f"    e{i} = {c.call(block, f'z{i}')}",
        f"    f{i}, = torch.autograd.grad(e{i}.sum(), z{i}, retain_graph=True)",
        [f"h = h + 0.1 * f{i}", f"h = e{i} + 0.1 * f{i}"][form],
    )
