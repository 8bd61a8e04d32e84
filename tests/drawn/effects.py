"""Side effects: what a unit passes on other than by returning it, and what it is passed other than as a tensor."""

from __future__ import annotations

from drawn.language import feature
from drawn.write import AUX, Writer, told


@feature("self.aux that the parent sums", kinds="module", weight=1.8, remedy=told)
def attribute(c: Writer) -> None:
    block = c.impure("h", c.changed(), f"self.aux = {AUX}", "return h")
    more = c.pick(f"self.blocks[{block}].aux", "sum(b.aux for b in self.blocks if hasattr(b, 'aux'))")
    c.do(f"h = {c.call(block, 'h')}", f"total = total + {more}")


@feature("a list argument that is appended to", remedy=told)
def appended(c: Writer) -> None:
    log = c.name("log")
    block = c.impure("h, log", c.changed(), f"log.append({AUX})", "return h")
    c.do(f"{log} = []", f"h = {c.call(block, f'h, {log}')}", f"total = total + sum({log})")


@feature("a dict argument that is filled", remedy=told)
def filled(c: Writer) -> None:
    cache, key = c.name("cache"), c.pick("aux", "h")
    block = c.impure("h, cache", c.changed(), f"cache['{key}'] = {AUX if key == 'aux' else 'h'}", "return h")
    c.do(f"{cache} = {{}}", f"h = {c.call(block, f'h, {cache}')}")
    value = f"{cache}['{key}']"
    c.do(f"total = total + {value}" if key == "aux" else f"total = total + 0.1 * {value}.square().mean()")


@feature("a dataclass argument", remedy=True)
def dataclass_in(c: Writer) -> None:
    form = c.number(3)
    if c.remedied:
        block = c.unit("h, v", f"h = h + {c.change('v')}", f"return h, {AUX}")
        c.do(f"h, {c.name('more')} = {c.call(block, 'h, h * 0.5')}")
        if form == 2:
            c.do(f"total = total + {c.name('more')}")
        return
    carry = c.name("carry")
    if form == 0:
        c.run("carry", f"return carry.h + {c.change('carry.penalty')}", given="Carry(h, h * 0.5)")
    elif form == 1:
        c.run("h, carry", f"return h + {c.change('carry.h')}", given="h, Carry(h * 0.5)")
    else:
        block = c.impure("h, carry", f"h = h + {c.change('carry.h')}", f"carry.penalty = {AUX}", "return h")
        c.do(f"{carry} = Carry(h * 0.5)", f"h = {c.call(block, f'h, {carry}')}", f"total = total + {carry}.penalty")


@feature("a dataclass output", remedy=told)
def dataclass_out(c: Writer) -> None:
    carry = c.name("carry")
    block = c.unit("h", c.changed(), f"return Carry(h, {AUX})")
    c.do(f"{carry} = {c.call(block, 'h')}", f"h = {carry}.h", f"total = total + {carry}.penalty")


@feature("an attribute that the parent sets before the call", kinds="module", weight=2.0, remedy=True)
def attribute_before(c: Writer) -> None:
    value = c.pick("h.mean(-1, keepdim=True)", "torch.sin(self.g)", "h * 0.5")
    if c.remedied:
        return c.run("h, context", f"return h + {c.change()} * context", given=f"h, {value}")
    block = c.impure("h", f"return h + {c.change()} * self.context", captured=True)
    c.do(f"self.blocks[{block}].context = {value}", f"h = {c.call(block, 'h')}")


@feature("a stash that a later unit reads", remedy=True)
def stash(c: Writer) -> None:
    a, form = c.name("stash"), c.number(3)
    w, b, _ = c.own()
    if c.remedied:
        first = c.unit("h", c.changed(), f"return h, h @ {w}")
        second = c.unit("h, old", f"return h + 0.3 * torch.tanh(old + {b})")
        c.do(f"h, {a} = {c.call(first, 'h')}", f"h = {c.call(second, f'h, {a}')}")
    elif form == 0 or c.pure:
        first = c.unit("h, stash", c.changed(), f"stash['old'] = h @ {w}", "return h")
        second = c.unit("h, stash", f"return h + 0.3 * torch.tanh(stash['old'] + {b})")
        c.do(f"{a} = {{}}", f"h = {c.call(first, f'h, {a}')}", f"h = {c.call(second, f'h, {a}')}")
    else:  # an object that both modules were made with
        init = [] if form == 1 else ["self.old = None"]
        keep = "self.stash['old']" if form == 1 else "self.stash.old"
        first = c.unit("h", c.changed(), f"{keep} = h @ {w}", "return h", init=init)
        second = c.unit("h", f"return h + 0.3 * torch.tanh({keep} + {b})")
        made = "{}" if form == 1 else "SimpleNamespace()"
        c.init.append(f"self.blocks[{first}].stash = self.blocks[{second}].stash = {made}")
        c.do(f"h = {c.call(first, 'h')}", f"h = {c.call(second, 'h')}")
    if not c.remedied:
        c.effect(first)


@feature("a buffer that is assigned", kinds="module", rows=False, weight=2.4, remedy=True)
def buffer(c: Writer) -> None:
    change = c.pick("{ema} = 0.5 * {ema} + 0.5 * h.detach().mean(0)", "{ema} = {ema} + 0.1", "{ema}.mul_(0.9)")
    body = f"return h + {c.change()} * "
    if c.remedied:  # a state of the function, handed to the unit
        ema, change = c.name("ema"), change.replace("{ema}.mul_(0.9)", "{ema} = {ema} * 0.9")
        c.top.append(f"{ema} = Config(torch.ones(4, dtype=F64))")
        c.do(change.format(ema=f"{ema}.scale"))
        c.run("h, ema", body + "ema", given=f"h, {ema}.scale")
        return
    init = ['self.register_buffer("ema", torch.ones(4, dtype=F64))']
    c.do(f"h = {c.call(c.impure('h', change.format(ema='self.ema'), body + 'self.ema', init=init), 'h')}")
