"""What goes into units and functions and comes out of them: closures, opaque objects, containers, other dtypes."""

from __future__ import annotations

from drawn.language import feature
from drawn.write import Writer


@feature("a closure over an activation", kinds="pure", weight=1.8, remedy=True)
def over_activation(c: Writer) -> None:
    a, block = c.name("a"), c.leaves()
    c.do(f"{a} = torch.sin(h)")
    if c.remedied:
        c.do(f"h = unit(lambda q, h, a: h + 0.3 * torch.tanh(a @ q['w'] + q['b']))(p['blocks'][{block}], h, {a})")
    else:
        c.effect(block, captured=True)
        c.do(f"h = unit(lambda q, h: h + 0.3 * torch.tanh({a} @ q['w'] + q['b']))(p['blocks'][{block}], h)")


@feature("a closure over a constant")
def over_constant(c: Writer) -> None:
    const = c.name("const")
    c.top.append(f"{const} = torch.linspace(0.5, 1.5, 4, dtype=F64)")
    if c.number(2):
        c.run("h", f"return h + {c.change()} * {const}")
    else:
        c.inside(c.plain(), f"h = h * {const}")


@feature("a closure over a list of leaves", kinds="pure", weight=1.8, remedy=True)
def over_leaves(c: Writer) -> None:
    ws, block, form = c.name("ws"), c.leaves(), c.number(3)
    c.do(f"{ws} = " + (f"[q['b'] for q in p['blocks'][:{c.program.plain}]]" if form else "[p['g'], p['g'] * 2]"))
    if c.remedied:
        c.do(f"h = unit(lambda q, h, ws: h + 0.1 * sum(ws) * torch.tanh(h @ q['w']))(p['blocks'][{block}], h, {ws})")
    else:
        c.do(f"h = unit(lambda q, h: h + 0.1 * sum({ws}) * torch.tanh(h @ q['w']))(p['blocks'][{block}], h)")


@feature("opaque arguments")
def opaque_in(c: Writer) -> None:
    what = f"h + {c.change()}"
    args, line, given = [
        ("h, mask, mode", f"return {what} if mask is None and mode == 'train' else h", "h, None, 'train'"),
        ("h, config", f"return ({what}) * config.scale", "h, Config(0.9)"),
        ("h, count", f"return {what} * count", "h, 2"),
        ("pair", "h, factor = pair", "Pair(h, 0.5)"),
        ("h, fn", "h = fn(h)", "h, torch.sin"),
        ("h, pair", "h = h * pair.one + pair.two['a'][0]", "h, Pair(0.9, {'a': [torch.cos(h)], 'b': None})"),
    ][c.number(6)]
    c.run(args, line, *([] if line.startswith("return") else [f"return {what}"]), given=given)


@feature("a torch.Generator as an argument", rows=False, remedy=True)
def generator(c: Writer) -> None:
    w, b, _ = c.own()
    gen, noise = c.name("gen"), "0.1 * torch.randn(h.shape, generator={}, dtype=F64)"
    c.do(f"{gen} = torch.Generator().manual_seed(3)")
    args, line, passed = ("h, noise", "", noise.format(gen)) if c.remedied else ("h, gen", noise.format("gen"), gen)
    block = c.unit(args, f"return h + 0.3 * torch.tanh((h + {line or 'noise'}) @ {w} + {b})")
    for _ in range(1 + c.number(2)):
        c.do(f"h = {c.call(block, f'h, {passed}')}")


@feature("opaque outputs of a unit")
def opaque_out(c: Writer) -> None:
    out = c.name("out")
    what = f"h + {c.change()}"
    line, use = [
        (f"return {what}, None, 'name'", f"h = {out}[0] if {out}[1] is None and {out}[2] == 'name' else h"),
        (f"return Pair({what}, 2)", f"h = {out}.one * {out}.two"),
        (f"return {{'h': {what}, 'config': Config(0.9)}}", f"h = {out}['h'] * {out}['config'].scale"),
        (f"return {what}, [h.shape[-1], (3.0, torch.cos)]", f"h = {out}[0] + 0.1 * {out}[1][1][1](h)"),
    ][c.number(4)]
    block = c.unit("h", line)
    c.do(f"{out} = {c.call(block, 'h')}", use)


@feature("several tensors in nested containers, in and out of a unit")
def nested(c: Writer) -> None:
    w, b, _ = c.own()
    out = c.name("out")
    block = c.unit(
        "d, t=()",
        f"a = torch.tanh(d['h'] @ {w} + {b})",
        "return {'a': a, 'more': [(d['h'] * t[0], d['z'][0].sum()), a.mean()]}",
    )
    c.do(
        f"{out} = {c.call(block, 'dict(h=h, z=[h, x]), t=(torch.cos(h), k)')}",
        f"h = 0.6 * h + 0.3 * {out}['a'] + 0.1 * {out}['more'][0][0]",
        f"total = total + 0.01 * {out}['more'][1]",
    )


@feature("keyword arguments")
def keywords(c: Writer) -> None:
    w, b, _ = c.own()
    args = "h, *, shift, scale=1.0, flag=False, mask=None"
    given = c.pick(
        f"h, shift={c.root('g')}, scale=0.3, flag=True",
        "h=h, shift=torch.sin(h), flag=True",
        "h=h, shift=None, mask=(h > 0)",
    )
    c.run(args, f"return h + scale * torch.tanh((h + shift) @ {w} + {b}) if flag else h * mask", given=given)


@feature("a unit whose input does not require grad")
def no_grad_input(c: Writer) -> None:
    given = c.pick("F.one_hot(k, 5)[:, :4].to(F64)", "h.detach()", "torch.ones_like(h)")
    c.do(f"h = h + 0.2 * {c.call(c.plain(), given)}")


# ---- outputs of the function


@feature("outputs in nested containers", forms="outputs", weight=3.2)
def containers(c: Writer) -> None:
    out = c.name("o")
    c.do_one(
        f'outs["{out}"] = [h, (torch.sin(h), {{"m": h.mean()}})]',
        f'outs["{out}"] = Pair(h * 2, [h.sum(-1)])',
        f'outs["{out}"] = ((h,), [], {{"a": h[:, 0], "b": {{"c": h[:, 1:]}}}})',
    )


@feature("complex outputs beside real ones", forms="outputs", weight=3.6)
def complex_out(c: Writer) -> None:
    out = c.name("z")
    w, _, _ = c.own()
    if c.number(3) == 0:
        block = c.unit("h", f"return torch.complex(h, h @ {w})")
        c.do(f'outs["{out}"] = {c.call(block, "h")}')
    else:
        made = c.pick("torch.fft.fft(h)", "torch.complex(h, torch.sin(h))", "torch.polar(h.square() + 1, h)")
        c.do(f'outs["{out}"] = {made}')


@feature("a complex activation between units")
def complex_between(c: Writer) -> None:
    w, b, _ = c.own()
    first = c.unit("h", f"return torch.complex(h, torch.tanh(h @ {w} + {b}))")
    second = c.unit("z", f"return (z * torch.complex({b}, {b})).real + z.abs() * 0.1")
    c.do(f"h = 0.5 * h + 0.2 * {c.call(second, c.call(first, 'h'))}")


@feature("integer outputs", forms="aux outputs", rows=False, weight=1.6)
def integers(c: Writer) -> None:
    out, block = c.name("i"), None
    w, _, _ = c.own()
    if c.number(3) == 0:
        block = c.unit("h", f"return h + 0.3 * torch.tanh(h @ {w}), (h > 0).sum(), h.argmax(-1)")
        c.do(f'h, outs["{out}a"], outs["{out}b"] = {c.call(block, "h")}')
    else:
        c.do(f'outs["{out}"] = {c.pick("(h > 0).sum()", "k + 1", "(h > 0, h.argmax(-1))")}')


@feature("opaque outputs of the function", forms="aux outputs", rows=False, weight=1.6)
def opaque_of_fn(c: Writer) -> None:
    out = c.name("o")
    c.do_one(
        f'outs["{out}"] = (None, "done", 3)',
        f'outs["{out}"] = Pair(h.mean(), None)',
        f'outs["{out}"] = {{"n": 2.5, "name": "x", "h": [h]}}',
    )
