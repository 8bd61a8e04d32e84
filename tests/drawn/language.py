"""What a program is: data that can be drawn, pickled, printed, shrunk, and written as Python.

A program names a model (pure functions over a pytree, or an `nn.Module`), the statements of its function, and what is
around the function: ranks, transforms, an optimizer, and the calls made of the step. A statement names a feature and
carries the numbers that the feature's author chooses by; `drawn.write` asks the feature for its lines of Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from drawn.write import Writer

D, V, BATCH = 4, 5, 4  # width, vocabulary, rows of one rank's batch
NUMBERS = 4  # that a statement or an action carries
KINDS = ("pure", "module")
FORMS = ("scalar", "aux", "outputs")


class Statement(NamedTuple):
    """One feature of a program, and the numbers it chooses its variant by.

    Attributes:
        feature: a name among `FEATURES`.
        numbers: taken modulo the number of choices, in the order in which the feature asks.
        remedied: whether it is written in the way that a refusal tells.
    """

    feature: str
    numbers: tuple[int, ...] = (0,) * NUMBERS
    remedied: bool = False


class Action(NamedTuple):
    """Something that is done with the step; a verb of `drawn.actions`."""

    verb: str
    numbers: tuple[int, ...] = (0,) * NUMBERS


@dataclass(frozen=True)
class Program:
    """A function as people write them, and what is around it.

    Attributes:
        seed: of the values of params, inputs and cotangents.
        kind: "pure" (a function over a pytree, with `fz.unit`) or "module" (an `nn.Module` for `fz.functional`).
        plain: the number of plain units, on which statements may act; others are made by features.
        statements: in the order in which they run.
        form: what the function returns: a scalar loss, (loss, aux), or outputs in containers.
        units: the patterns of `train_step(units=)`.
        world: ranks.
        stage: of ZeRO; 0 only on one rank.
        transforms: names among `drawn.sharded.TRANSFORMS`, in the order in which they are applied.
        optimizer: a name among `drawn.optimizers`.
        actions: what is done with the step, in order.
    """

    seed: int = 0
    kind: str = "pure"
    plain: int = 2
    statements: tuple[Statement, ...] = ()
    form: str = "scalar"
    units: tuple[str, ...] | None = None
    world: int = 1
    stage: int = 3
    transforms: tuple[str, ...] = ()
    optimizer: str = "sgd"
    actions: tuple[Action, ...] = (Action("vjp"),)

    def replace(self, **changes: object) -> Program:
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    @property
    def features(self) -> list[Feature]:
        return [FEATURES[statement.feature] for statement in self.statements]

    @property
    def nests(self) -> bool:
        return all(feature.nests for feature in self.features)

    @property
    def checkpoints(self) -> bool:
        return any(feature.checkpoints for feature in self.features)

    @property
    def rows(self) -> bool:
        """Whether every row of the batch is treated by itself: then microbatches and single examples mean something."""
        return all(feature.rows for feature in self.features)


@dataclass(frozen=True)
class Feature:
    """Something that people write.

    Attributes:
        name: as reports show it.
        write: writes it; asks the writer for choices, places and units.
        kinds: of models that can have it.
        forms: of outputs that can have it.
        rows: whether it treats every row of the batch by itself.
        checkpoints: whether it calls torch.utils.checkpoint, which only units may, and which torch does not map.
        nests: whether a derivative of a derivative has one answer: what is done under no_grad counts as constant for
            autograd's double backward, and for torch.func only at the innermost level.
        weight: how often it is drawn, relative to others: more often where plain torch refuses it often.
        remedy: whether it can be written in another way, which a refusal would tell; or what writes it so.
    """

    name: str
    write: Callable[[Writer], None]
    kinds: tuple[str, ...] = KINDS
    forms: tuple[str, ...] = FORMS
    rows: bool = True
    checkpoints: bool = False
    nests: bool = True
    weight: float = 1.0
    remedy: bool | Callable[[Writer], None] = False


FEATURES: dict[str, Feature] = {}


def feature(
    name: str, *, kinds: str = "pure module", forms: str = "scalar aux outputs", **more: Any
) -> Callable[[Callable[[Writer], None]], Callable[[Writer], None]]:
    """Enters a writing function into the language."""

    def enter(write: Callable[[Writer], None]) -> Callable[[Writer], None]:
        assert name not in FEATURES
        FEATURES[name] = Feature(name, write, tuple(kinds.split()), tuple(forms.split()), **more)
        return write

    return enter
