"""Loops, exits, units within units, Functions, no_grad, checkpoints, hooks."""

from __future__ import annotations

from drawn.language import feature
from drawn.write import Writer


@feature("an early exit", rows=False)
def early(c: Writer) -> None:
    block, form = c.plain(), c.number(3)
    if form == 0:  # an output of the same structure, so that a step may take it
        c.do(f"if {c.n} % 3 == 1:", *["    " + line for line in c.leave()])
    elif form == 1:
        c.do("for i in range(3):", f"    h = {c.call(block, 'h')}", f"    if (i + {c.n}) % 2:", "        break")
    else:
        c.do("if int(k[0]) % 2:", *["    " + line for line in c.leave()])


@feature("a loop whose length changes from step to step", rows=False)
def by_step(c: Writer) -> None:
    if c.pure and c.number(2):
        c.do(f"for i in range({c.program.plain})[: 1 + {c.n} % 2]:", f"    h = block{0}(p['blocks'][i], h)")
    else:
        c.do(f"for _ in range({c.n} % 3):", f"    h = {c.call(c.plain(), 'h')}")


@feature("a loop whose length the data decides", rows=False)
def by_data(c: Writer) -> None:
    block = c.plain()
    c.do(f"for _ in range(int({c.pick('k.sum()', 'k[1]', 'k.max()')}) % 3):", f"    h = {c.call(block, 'h')}")


@feature("a unit in a loop with shared weights")
def recurrent(c: Writer) -> None:
    w, b, _ = c.own()
    form, state = c.number(3), c.name("state")
    if form == 0:
        c.do(f"for _ in range({2 + c.number(2)}):", f"    h = {c.call(c.plain(), 'h')}")
    elif form == 1:
        block = c.unit("state, v", f"return torch.tanh(state @ {w} + v * {b})")
        c.do(
            f"{state} = torch.zeros(4, dtype=F64)",
            "for v in h.unbind(1):",
            f"    {state} = {c.call(block, f'{state}, v[:, None]')}",
            f"h = 0.5 * h + 0.5 * {state}",
        )
    else:
        block = c.unit("h, depth", f"return h + {c.change()} / (1 + depth)")
        c.do("for depth in range(3):", f"    h = {c.call(block, 'h, depth')}")


@feature("a unit within a unit")
def within(c: Writer) -> None:
    w, b, _ = c.own()
    if c.pure:
        other = c.plain()
        if c.number(2):  # handed the other's params
            block = c.unit("h, r", f"return h + 0.3 * torch.tanh(block{other}(r, h) @ {w} + {b})")
            c.do(f"h = {c.call(block, f'h, p[{chr(34)}blocks{chr(34)}][{other}]')}")
        else:  # with its own
            c.run("h", "return h + 0.3 * unit(lambda q, h: torch.tanh(h @ q['w'] + q['b']))(q, h)")
    else:
        inner = ["self.inner = nn.ModuleList([Head(f'inner.{i}', 4, 4) for i in range(2)])"]
        c.run("h", f"return h + 0.2 * torch.tanh(self.inner[1](self.inner[0](h)) @ {w} + {b})", init=inner)


@feature("a custom Function with setup_context")
def custom(c: Writer) -> None:
    w, _, _ = c.own()
    if c.number(2):
        c.inside(
            c.plain(),
            c.pick("h = h + 0.1 * Cube.apply(torch.sin(h))", f"h = h + 0.1 * torch.tanh(Scaled.apply(h, {w}))"),
        )
    else:
        c.do_one(
            "h = h + 0.1 * Cube.apply(torch.sin(h))",
            f"h = h + 0.1 * torch.tanh(Scaled.apply(h, {c.root('g')}[:, None] * {c.root('g')}))",
        )


@feature("a no_grad block", nests=False)
def no_grad(c: Writer) -> None:
    m, block = c.name("m"), c.plain()
    w, b, _ = c.own()
    if c.number(3) == 0:
        c.inside(block, f"with torch.no_grad():\n    m = torch.tanh(h @ {w} + {b})\nh = h + 0.1 * m")
    else:
        c.do("with torch.no_grad():", f"    {m} = {c.call(block, 'h')}", f"h = h + 0.1 * {m}")


@feature("torch.utils.checkpoint over a unit's own weights", checkpoints=True, weight=1.3, remedy=True)
def checkpointed(c: Writer) -> None:
    """Refused where derivatives nest and in fz.tape: there the function is written without, and fz.remat recomputes."""
    w, b, _ = c.own()
    if c.remedied:
        c.inside(c.plain(), c.changed())
    else:
        c.inside(c.plain(), f"h = h + 0.3 * checkpoint(lambda h: torch.tanh(h @ {w} + {b}), h, use_reentrant=False)")


@feature("a hook over a root leaf or an attribute", kinds="module", weight=1.8, remedy=True)
def hook(c: Writer) -> None:
    form = c.number(4)
    block = c.unit("h", f"return h + {c.change()}")
    if c.remedied:
        before = ["h", "h + 0.1 * self.g", "h * 0.9", "h"][form]
        after = ["h * (1 + 0.1 * self.g)", "h", "h", f"h * (1 + 0.1 * {c.leaf(block, 'b')})"][form]
        c.do(f"h = {c.call(block, before)}", f"h = {after}")
        return
    own = f"self.blocks[{block}]"
    c.init.append(
        [
            f"{own}.register_forward_hook(functools.partial(lambda own, m, i, o: o * (1 + 0.1 * own.g), self))",
            f"{own}.register_forward_pre_hook(functools.partial(lambda own, m, i: (i[0] + 0.1 * own.g,), self))",
            f"{own}.register_forward_pre_hook(lambda m, i: (i[0] * 0.9,))",
            f"{own}.register_forward_hook(lambda m, i, o: o * (1 + 0.1 * m.b))",
        ][form]
    )
    c.do(f"h = {c.call(block, 'h')}")


@feature("closures over self", kinds="module", weight=1.8, remedy=True)
def over_self(c: Writer) -> None:
    form, name = c.number(3), c.name("fns")
    if c.remedied:
        own = c.unit("h", f"return h + {c.change()}")
        after = ["h * (1 + 0.1 * self.g) + self.head.weight.mean() * 0.1", "h * (1 + 0.1 * self.g)", "h"][form]
        c.do(f"h = {c.call(own, 'h')}", f"h = {after}")
    elif form == 0:  # a list of lambdas
        c.init.append(f"self.{name} = [lambda h: h * (1 + 0.1 * self.g), lambda h: self.head.weight.mean() * 0.1 + h]")
        c.do(f"for f in self.{name}:", "    h = f(h)")
    elif form == 1:  # a wrapped forward
        own = c.unit("h", f"return h + {c.change()}")
        c.init += [
            f"{name} = self.blocks[{own}].forward",
            f"self.blocks[{own}].forward = lambda h: {name}(h) * (1 + 0.1 * self.g)",
        ]
        c.do(f"h = {c.call(own, 'h')}")
    else:  # of the unit itself
        c.run("h", "return self.act(h)", init=[f"self.act = lambda h: h + {c.change()}"])
