"""A program as Python: every statement writes its lines into units, into the function, or around it."""

from __future__ import annotations

import fnmatch
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from drawn.language import BATCH, FEATURES, D, Program, Statement, V

LEAVES = {"w": f"{D}, {D}", "b": f"{D}", "s": ""}
AUX = "0.1 * h.square().mean()"
BODY = "h = h + 0.5 * torch.tanh(h @ {w} + {b}) * {s}"


@dataclass
class Block:
    """A unit of the list: its leaves, the arguments and lines of its function, and lines of its module's __init__."""

    args: str = "h"
    first: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    last: str = "return h"
    init: list[str] = field(default_factory=list)
    leaves: dict[str, str] = field(default_factory=lambda: dict(LEAVES))
    written: bool = True  # False: only its leaves are used, by a function that a statement writes


class Writer:
    """What a feature writes with. Texts that name a leaf or call a unit come from here: they differ between kinds."""

    def __init__(self, program: Program) -> None:
        self.program, self.pure = program, program.kind == "pure"
        self.blocks = [Block(lines=[self.body()]) for _ in range(program.plain)]
        self.lines: list[str] = []  # of the function, or of the module's forward
        self.around: list[str] = []  # of the function, after the module was called
        self.init: list[str] = []  # of the module's __init__
        self.top: list[str] = []  # of the file
        self.before: list[str] = []  # the function's first lines
        self.renamed: dict[str, str] = {}  # root leaf -> the variable that has taken its place
        self.effects: list[tuple[int, bool]] = []  # unit, and whether only its differentiated capture is one
        self.counted = False
        self.statement = Statement("")
        self._asked, self._index = 0, 0

    # ---- choices

    def number(self, count: int) -> int:
        """A choice among `count`, by the statement's next number."""
        number = self.statement.numbers[self._asked % len(self.statement.numbers)]
        self._asked += 1
        return number % count

    def pick(self, *options: str) -> str:
        return options[self.number(len(options))]

    def plain(self) -> int:
        """One of the plain units."""
        return self.number(self.program.plain)

    @property
    def remedied(self) -> bool:
        return self.statement.remedied

    def name(self, stem: str) -> str:
        """A variable that no other statement has."""
        return f"{stem}{self._index}"

    @property
    def n(self) -> str:
        """The number of the step, an input of the function."""
        self.counted = True
        return "n"

    # ---- leaves and units, as texts

    def own(self, names: str = "w b s") -> list[str]:
        """The leaves of a unit, as its own function reads them."""
        return [f'q["{name}"]' if self.pure else f"self.{name}" for name in names.split()]

    def change(self, of: str = "h") -> str:
        """What most units add to what they are given."""
        w, b, _ = self.own()
        return f"0.3 * torch.tanh({of} @ {w} + {b})"

    def changed(self) -> str:
        return f"h = h + {self.change()}"

    def body(self) -> str:
        w, b, s = self.own()
        return BODY.format(w=w, b=b, s=s)

    def leaf(self, block: int, name: str) -> str:
        """A leaf of a unit of the list, as the function reads it."""
        return f'p["blocks"][{block}]["{name}"]' if self.pure else f"self.blocks[{block}].{name}"

    def root(self, name: str) -> str:
        """A leaf "g", "emb.weight", "head.weight", as the function reads it."""
        if name in self.renamed:
            return self.renamed[name]
        return f"self.{name}" if not self.pure else "p" + "".join(f'["{part}"]' for part in name.split("."))

    def call(self, block: int, args: str) -> str:
        return f'block{block}(p["blocks"][{block}], {args})' if self.pure else f"self.blocks[{block}]({args})"

    def unit(self, args: str, *lines: str, init: Sequence[str] = (), **leaves: str) -> int:
        """Another unit; its lines end with a return. `leaves`: beside w, b, s, name -> sizes."""
        *body, last = lines
        self.blocks.append(Block(args, [], list(body), last, list(init), {**LEAVES, **leaves}))
        return len(self.blocks) - 1

    def run(self, args: str, *lines: str, given: str = "", init: Sequence[str] = (), **leaves: str) -> None:
        """Another unit, and its call: what it returns is the activation."""
        self.do(f"h = {self.call(self.unit(args, *lines, init=init, **leaves), given or args)}")

    def effect(self, block: int, captured: bool = False) -> int:
        """A unit is not pure; `captured`: as it closes over a tensor, where that is differentiated."""
        self.effects.append((block, captured))
        return block

    def impure(self, args: str, *lines: str, captured: bool = False, init: Sequence[str] = ()) -> int:
        return self.effect(self.unit(args, *lines, init=init), captured)

    def leaves(self) -> int:
        """A unit of which there are only leaves: its function is written where it is called."""
        assert self.pure
        self.blocks.append(Block(written=False))
        return len(self.blocks) - 1

    def leave(self) -> list[str]:
        """Lines that return from the function here."""
        return [*self._loss(), *(self._end() if self.pure else ["return loss, h, outs"])]

    def inside(self, block: int, *lines: str, first: bool = False) -> None:
        """Lines of a plain unit."""
        (self.blocks[block].first if first else self.blocks[block].lines).extend(lines)

    def do(self, *lines: str) -> None:
        """Lines of the function."""
        self.lines.extend(lines)

    def do_one(self, *options: str) -> None:
        self.do(self.pick(*options))

    def inside_one(self, *options: str) -> None:
        self.inside(self.plain(), self.pick(*options))

    # ---- the file

    def write(self, statement: Statement, index: int) -> None:
        self.statement, self._index, self._asked = statement, index, 0
        feature = FEATURES[statement.feature]
        writes = feature.remedy if callable(feature.remedy) and statement.remedied else feature.write
        writes(self)

    def signature(self) -> str:
        return "x, y, k, n" if self.counted else "x, y, k"

    def finished(self) -> str:
        for block in range(self.program.plain):
            if not any(self.call(block, "h") in line for line in self.lines):
                self.lines.append(f"h = {self.call(block, 'h')}")
        return self._pure() if self.pure else self._module()

    def _loss(self) -> list[str]:
        logits = 'head(p["head"], h)' if self.pure else "self.head(h)"
        return [f"loss = F.cross_entropy({logits}, k) + (h * {self.root('g')} - y).square().mean() + total"]

    def _start(self) -> list[str]:
        emb = 'emb(p["emb"], k)' if self.pure else "self.emb(k)"
        return ["total, outs = 0.0, {}", f"h = x + 0.3 * {emb}", *self.before]

    def _end(self) -> list[str]:
        return {
            "scalar": ["return loss"],
            "aux": ['return loss, {"h": h, **outs}'],
            "outputs": ['return {"loss": loss, "h": h, **outs}'],
        }[self.program.form]

    def _pure(self) -> str:
        sizes = [
            "{"
            + ", ".join(f'"{name}": draw("blocks.{i}.{name}", {shape})' for name, shape in block.leaves.items())
            + "}"
            for i, block in enumerate(self.blocks)
        ]
        out = [
            "params = {",
            f'    "emb": {{"weight": draw("emb.weight", {V}, {D})}},',
            f'    "g": draw("g", {D}),',
            '    "blocks": [',
            *[f"        {text}," for text in sizes],
            "    ],",
            f'    "head": {{"weight": draw("head.weight", {V}, {D})}},',
            "}",
            "",
            'emb = unit(lambda q, k: F.embedding(k, q["weight"]))',
            'head = unit(lambda q, h: F.linear(h, q["weight"]))',
            *self.top,
        ]
        for i, block in enumerate(self.blocks):
            if block.written:
                out += ["", "@unit", f"def block{i}(q, {block.args}):", *_in([*block.first, *block.lines, block.last])]
        body = [*self._start(), *self.lines, *self._loss(), *self.around, *self._end()]
        return "\n".join([*out, "", f"def fn(p, {self.signature()}):", *_in(body), ""])

    def _module(self) -> str:
        out = [*self.top]
        for i, block in enumerate(self.blocks):
            made = [f'self.{name} = leaf("blocks.{i}.{name}", {shape})' for name, shape in block.leaves.items()]
            out += [
                f"class Block{i}(nn.Module):",
                "    def __init__(self):",
                *_in(["super().__init__()", *made, *block.init], 2),
                f"    def forward(self, {block.args}):",
                *_in([*block.first, *block.lines, block.last], 2),
                "",
            ]
        blocks = ", ".join(f"Block{i}()" for i in range(len(self.blocks)))
        made = [
            "super().__init__()",
            f'self.emb = Table("emb.weight", {V}, {D})',
            f'self.g = leaf("g", {D})',
            f"self.blocks = nn.ModuleList([{blocks}])",
            f'self.head = Head("head.weight", {V}, {D})',
            *self.init,
        ]
        out += [
            "class Model(nn.Module):",
            "    def __init__(self):",
            *_in(made, 2),
            f"    def forward(self, {self.signature()}):",
            *_in([*self._start(), *self.lines, *self._loss(), "return loss, h, outs"], 2),
            "",
            "net = functional(Model())",
            "",
            f"def fn(p, {self.signature()}):",
            *_in([f"loss, h, outs = net(p, {self.signature()})", *self.around, *self._end()]),
            "",
        ]
        return "\n".join(out)


def told(c: Writer) -> None:
    """What each refusal of a side effect says: return it."""
    more = c.name("more")
    block = c.unit("h", c.changed(), f"return h, {AUX}")
    c.do(f"h, {more} = {c.call(block, 'h')}", f"total = total + {more}")


def _in(lines: Sequence[str], depth: int = 1) -> list[str]:
    return textwrap.indent("\n".join(lines), "    " * depth).split("\n")


def _writer(program: Program) -> Writer:
    writer = Writer(program)
    for index, statement in enumerate(program.statements):
        writer.write(statement, index)
    return writer


def written(program: Program) -> tuple[str, bool]:
    """The file of a program, and whether its function takes the number of the step."""
    writer = _writer(program)
    text = writer.finished()
    return text, writer.counted


def must_be_refused(program: Program) -> bool:
    """Whether one of its units is not pure in whatever runs of it."""
    if any(s.feature == "an early exit" for s in program.statements):  # which may come before
        return False
    units = program.units or ("blocks.*",)
    derives = "freeze" not in program.transforms and any(a.verb not in ("forward", "none") for a in program.actions)
    return any(
        (derives or not captured) and any(p == "blocks" or fnmatch.fnmatch(f"blocks.{block}", p) for p in units)
        for block, captured in _writer(program).effects
    )


def listing(program: Program) -> str:
    """The program as a reader wants it: what is around the function, and the file."""
    around = [f"shard_zero{program.stage}"] if program.stage else []
    head = [
        f"# {program.kind}, {program.world} ranks, {', '.join([*around, *program.transforms]) or 'no transform'}, "
        f"{program.optimizer}, units={program.units}; {BATCH} rows a rank",
        f"# features: {'; '.join(s.feature + (' (remedied)' if s.remedied else '') for s in program.statements)}",
        f"# actions: {', '.join(f'{a.verb}{a.numbers}' for a in program.actions)}",
    ]
    return "\n".join([*head, written(program)[0]])
