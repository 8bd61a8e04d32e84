"""Leaves where people use them: outside their unit, in another one, twice, tied, detached, as outputs, all at once."""

from __future__ import annotations

from drawn.language import feature
from drawn.write import Writer


@feature("a root leaf in the middle")
def root(c: Writer) -> None:
    g = c.root("g")
    c.do_one(f"h = h + 0.1 * torch.sin({g})", f"h = h * (1 + 0.1 * {g})", f"h = torch.lerp(h, {g}.expand_as(h), 0.1)")


OUTSIDE = [
    "h = h + 0.1 * (h @ {w}.T)",
    "h = h + 0.1 * F.linear(h, {w}, {b})",
    "h = h + 0.1 * torch.mm(h, {w})",
    "h = h + 0.1 * torch.addmm({b}, h, {w})",
    "h = h * (1 + 0.1 * {b})",
    "h = h + 0.1 * torch.einsum('bi,ij->bj', h, {w})",
    "h = h + 0.1 * torch.bmm(h[None], {w}[None])[0]",
    "h = h + 0.1 * F.conv1d(h[:, None], {w}[:2, None, :3], padding=1)[:, 0]",
    "h = h + 0.1 * torch.linalg.solve({w} @ {w}.T + 2 * torch.eye(4, dtype=F64), h.T).T",
    "total = total + 0.1 * {w}.square().mean()",
    "total = total + 0.1 * torch.cdist({w}, {w}.detach() + 1).mean()",
    "h = h + 0.1 * torch.einsum('bi,ij->bj', h, torch.stack([{w}, {w}.T]).sum(0))",
]


@feature("a leaf outside its unit", rows=True, remedy=True)
def outside(c: Writer) -> None:
    block, text = c.plain(), c.pick(*OUTSIDE)
    if c.remedied and c.pure:
        target, expression = text.format(w='q["w"]', b='q["b"]').split(" = ")
        args = "h" if target == "h" else "total, h"
        c.do(f'{target} = unit(lambda q, {args}: {expression})(p["blocks"][{block}], {args})')
        return
    c.do(text.format(w=c.leaf(block, "w"), b=c.leaf(block, "b")))


@feature("another unit's leaf in a unit")
def passed(c: Writer) -> None:
    other, form = c.plain(), c.number(3)
    w, b, _ = c.own()
    if form == 0:
        c.run("h, v", f"return h + 0.3 * torch.tanh(h @ {w} @ v + {b})", given="h, " + c.leaf(other, "w"))
    elif form == 1:
        c.run("h, v=None", f"return h + 0.3 * torch.tanh(F.linear(h, v, {b}))", given="h, v=" + c.leaf(other, "w"))
    else:
        both = f"h, [dict(w={c.leaf(other, 'w')}), {c.root('g')}]"
        c.run("h, v", f"return h + 0.1 * torch.tanh(h @ {w} @ v[0]['w'] + v[1])", given=both)


@feature("another module's weight read by the parent", kinds="module", weight=1.9)
def codebook(c: Writer) -> None:
    block, form = c.plain(), c.number(3)
    if form == 0:
        c.do(f"h = h + 0.1 * (h @ self.blocks[{block}].w.T)")
    elif form == 1:
        c.do(f"h = h + 0.1 * sum(h @ b.w.T for b in self.blocks[:{block + 1}])")
    else:
        c.do("h = h + 0.1 * torch.stack([b.b for b in self.blocks]).mean(0)")


@feature("a leaf twice in one unit")
def twice(c: Writer) -> None:
    w, b, s = c.own()
    c.inside_one(
        f"h = h + 0.1 * torch.tanh(h @ {w} @ {w}.T)",
        f"h = h + 0.1 * {b} * {b} + 0.1 * {s} * h",
        f"h = h + 0.1 * torch.tanh(torch.tanh(h @ {w}) @ {w})",
    )


@feature("a leaf in two calls")
def calls(c: Writer) -> None:
    call = c.call(c.plain(), "h")
    c.do(f"h = {call}", c.pick("h = torch.sin(h)", "h = h.neg()", f"h = h + 0.1 * {c.root('g')}"), f"h = {call}")


@feature("a unit's weights tied to another unit's", kinds="module", weight=1.9)
def tied(c: Writer) -> None:
    block = c.unit("h", f"return h + {c.change()}")
    name = c.pick("w", "b")
    c.init.append(f"self.blocks[{block}].{name} = self.blocks[{c.plain()}].{name}")
    c.do(f"h = {c.call(block, 'h')}")


@feature("an embedding tied to a head", remedy=True)
def tied_head(c: Writer) -> None:
    """In pure functions refused where units= names the embedding: a leaf outside its unit."""
    if c.pure and c.remedied:
        c.do('total = total + 0.2 * F.cross_entropy(unit(lambda q, h: F.linear(h, q["weight"]))(p["emb"], h), k)')
    elif c.pure or c.number(2):
        emb = c.root("emb.weight")
        c.do(f"total = total + 0.2 * F.cross_entropy(F.linear(h, {emb}), k)")
    else:
        c.init.append("self.head.weight = self.emb.weight")


@feature("a leaf behind detach", remedy=True)
def detached(c: Writer) -> None:
    where, block = c.number(3), c.plain()
    w, b, _ = c.own()
    if where == 0:
        c.inside(block, c.pick(f"h = h + 0.1 * (h @ {w}.detach())", f"h = h + 0.1 * ({b}.detach() * {b})"))
    elif where == 1:
        g = c.root("g")
        c.do_one(f"h = h + 0.1 * {g}.detach()", f"h = h * (1 + 0.1 * {g} * {g}.detach())")
    elif c.remedied and c.pure:
        c.do(f'h = unit(lambda q, h: h + 0.1 * (h @ q["w"].detach()))(p["blocks"][{block}], h)')
    else:
        c.do(f"h = h + 0.1 * (h @ {c.leaf(block, 'w')}.detach())")


@feature("a leaf as an output of a unit")
def leaf_out(c: Writer) -> None:
    w, b, _ = c.own()
    form, name = c.number(4), c.name("w")
    block = c.unit("h", c.changed(), f"return h, {[w, w + '.T', b + '[:2]', w + '.detach()'][form]}")
    use = f"{name}.sum()" if form == 2 else f"(h @ {name})"
    c.do(f"h, {name} = {c.call(block, 'h')}", f"h = h + 0.1 * {use}")


@feature("a leaf as an output", forms="outputs", rows=False, weight=3.0, remedy=True)
def output(c: Writer) -> None:
    _leaf_out(c)


@feature("a leaf as aux", forms="aux", rows=False, weight=3.2, remedy=True)
def aux(c: Writer) -> None:
    _leaf_out(c)


def _leaf_out(c: Writer) -> None:
    place, name = c.number(4), c.name("leaf")
    block = c.plain()
    if place == 0:
        text = c.root("g")
    elif place == 1:
        text = f"{c.root('g')}[1:]"
    elif c.remedied and c.pure:
        text = f'unit(lambda q: q["w"])(p["blocks"][{block}])'
    else:
        text = c.leaf(block, "w")
    c.do(f'outs["{name}"] = {text}')


SUMMED = "loss = loss + 0.01 * sum_over(p, lambda l: l.square().sum())"


@feature("a regulariser over all leaves", remedy=True)
def regulariser(c: Writer) -> None:
    if c.remedied:
        c.around.append(SUMMED)
    elif c.pure or c.number(2):
        c.around.append("loss = loss + 0.01 * sum(l.square().sum() for l in tree_leaves(p))")
    else:
        c.do("total = total + 0.01 * sum(l.square().sum() for l in self.parameters())")


@feature("leaves filtered by isinstance", remedy=True)
def filtered(c: Writer) -> None:
    told = "loss = loss + 0.01 * sum(l.square().sum() for l in tree_leaves(p) if isinstance(l, torch.Tensor))"
    c.around.append(SUMMED if c.remedied else told)


@feature("fz.sum_over")
def summed(c: Writer) -> None:
    other = "loss = loss + 0.01 * sum_over(p, lambda l: l.abs().sum() if l.ndim > 1 else 0.5 * l.sum())"
    c.around.append(c.pick(SUMMED, other))


@feature("a leaf never used")
def unused(c: Writer) -> None:
    c.run("h", f"return h + {c.change()}", u="3")


@feature("an output that does not depend on the params")
def independent(c: Writer) -> None:
    block = c.unit("h", "m = torch.sin(h)", "return m")
    c.do(f"h = h + 0.2 * {c.call(block, 'h')}")


@feature("params with requires_grad=False", kinds="module", weight=1.9)
def frozen(c: Writer) -> None:
    block = c.plain()
    of = c.pick(f"self.blocks[{block}].w", f"self.blocks[{block}]", "self.emb.weight")
    c.init.append(f"{of}.requires_grad_(False)")


@feature("views, indexing and gather of leaves")
def views(c: Writer) -> None:
    w, b, _ = c.own()
    c.inside_one(
        f"h = h + 0.1 * torch.tanh(h @ {w}.T)",
        f"h = h + 0.1 * {w}.view(-1)[3:7]",
        f"h = h + 0.1 * {b}.expand(h.shape)",
        f"h = h + 0.1 * {w}[1] + 0.1 * {w}[:, 2]",
        f"h = h + 0.1 * {w}[torch.tensor([0, 2, 2])].sum(0)",
        f"h = h + 0.1 * torch.gather({w}, 1, torch.tensor([[0], [3], [1], [1]])).T",
        f"h = h + 0.1 * {w}.reshape(2, 8).transpose(0, 1).reshape(4, 4)[0]",
        f"h = h + 0.1 * torch.cat([{b}[2:], {b}[:2]]) * {w}.diagonal()",
        f"h = h + 0.1 * F.embedding(torch.tensor([1, 1, 3]), {w}).mean(0)",
    )
