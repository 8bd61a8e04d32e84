"""What lies around a unit: classes, context variables, errors that are caught, what a caller keeps, other counters."""

from __future__ import annotations

from drawn.language import feature
from drawn.write import AUX, Writer, told

SIN = "torch.sin(h)"


@feature("a class attribute", remedy=True)
def class_attribute(c: Writer) -> None:
    """Set around a call, counted up, read where it is differentiated, or left for the caller."""
    hold, form = c.name("Hold"), c.number(4)
    c.top.append(f"class {hold}:\n    value = 1.0")
    what = f"h + {c.change()}"
    if c.remedied and form == 3:
        told(c)
    elif c.remedied:
        block = c.unit("h, value", f"return {what} * value")
        c.do(f"h = {c.call(block, f'h, {(0.8, 1.1, SIN)[form]}')}")
        c.do(*[f"h = {c.call(block, 'h, 1.2')} * 1.2"][: form == 1])
    elif form == 0:
        block = c.unit("h", f"return {what} * {hold}.value")
        c.do(f"{hold}.value = 0.8", f"h = {c.call(block, 'h')}", f"{hold}.value = 1.1")
    elif form == 1:
        block = c.impure("h", f"{hold}.value += 0.1", f"return {what} * {hold}.value")
        c.do(f"{hold}.value = 1.0", f"h = {c.call(block, 'h')}", f"h = {c.call(block, 'h')} * {hold}.value")
    elif form == 2:
        block = c.impure("h", f"return {what} * {hold}.value", captured=True)
        c.do(f"{hold}.value = {SIN}", f"h = {c.call(block, 'h')}", f"{hold}.value = 1.0")
    else:
        block = c.impure("h", c.changed(), f"{hold}.value = {AUX}", "return h")
        c.do(f"h = {c.call(block, 'h')}", f"total = total + {hold}.value", f"{hold}.value = 1.0")


@feature("an error that the caller catches", rows=False, remedy=True)
def error(c: Writer) -> None:
    form, log = c.number(3), c.name("log")
    what = c.change()
    if form == 0:  # in some steps
        block = c.unit("h, n", "if n % 2:\n    raise ValueError('odd')", f"return h + {what}")
        c.do("try:", f"    h = {c.call(block, f'h, {c.n}')}", "except ValueError:", "    h = 0.9 * h")
    elif c.remedied:
        c.run("h", f"return h + {what}")
    elif form == 1:  # the error carries a tensor
        block = c.impure("h", f"h = h + {what}", "raise KeyError(h)")
        c.do("try:", f"    h = {c.call(block, 'h')}", "except KeyError as error:", "    h = error.args[0]")
    else:  # what was done before it stays
        block = c.impure("h, log", f"h = h + {what}", "log.append(h)", "raise StopIteration")
        c.do(f"{log} = []", "try:", f"    h = {c.call(block, f'h, {log}')}")
        c.do("except StopIteration:", f"    h = {log}[-1]")


@feature("a context variable around a call", remedy=True)
def variable(c: Writer) -> None:
    var, token = c.name("var"), c.name("token")
    again = c.number(2)
    if c.remedied:
        block = c.unit("h, value", f"return h + {c.change()} * value")
        c.do(*[f"h = {c.call(block, f'h, {value}')}" for value in (0.5, 1.0)[: 1 + again]])
        return
    c.top.append(f"{var} = ContextVar('{var}', default=1.0)")
    block = c.unit("h", f"return h + {c.change()} * {var}.get()")
    c.do(f"{token} = {var}.set(0.5)", f"h = {c.call(block, 'h')}", f"{var}.reset({token})")
    if again:
        c.do(f"h = {c.call(block, 'h')}")


@feature("an argument given twice", remedy=True)
def twice(c: Writer) -> None:
    a, form = c.name("a"), c.number(7)
    then = f"h + {c.change('v')}"
    if form < 3:
        c.run("h, v", f"return {then}", given=["h, h", "h, h[...]", "h, h.view(h.shape)"][form])
    elif form < 5:
        block = c.unit("h, v", f"return {then}, v")
        c.do(f"h, {a} = {c.call(block, ['h, h', 'h, h.T.T'][form - 3])}", f"h = h + 0.1 * {a}")
    elif c.remedied:
        block = c.unit("h", "v = h * 0.5", "h = v", f"return {then}, v")
        c.do(f"{a} = h * 1.0", f"h, {a} = {c.call(block, a)}", f"h = h + 0.1 * {a}")
    else:  # and changed
        block = c.impure("h, v", "v.mul_(0.5)", f"return {then}, v")
        given = f"{a}, {a}" + ["", "[...]"][form - 5]
        c.do(f"{a} = h * 1.0", f"h, {a} = {c.call(block, given)}", f"h = h + 0.1 * {a}")


@feature("data that decide what a unit reads", kinds="pure", rows=False, weight=1.8, remedy=True)
def decided(c: Writer) -> None:
    a, block, form, first = c.name("a"), c.leaves(), c.number(2), c.name("first")
    c.do(f"{a} = [torch.sin(h)]", f"{first} = float({c.root('g')}.sum()) > 0")  # alike on all ranks
    taken = f"({a}[0] if {first} else h)" if form else f"(h if {first} else {a}[0])"
    if c.remedied:
        c.do(f"h = unit(lambda q, h, a: h + 0.3 * torch.tanh(a @ q['w'] + q['b']))(p['blocks'][{block}], h, {taken})")
        return
    c.do(f"h = unit(lambda q, h: h + 0.3 * torch.tanh({taken} @ q['w'] + q['b']))(p['blocks'][{block}], h)")
