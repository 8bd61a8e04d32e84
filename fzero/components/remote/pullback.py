"""What a component's calls leave to be pulled back: the pullback of vjp, and the passes of a pipeline's stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from fzero.base import pytree
from fzero.base.arguments import need_bool
from fzero.components.remote.handle import Away, Handle, Made, Owner, RemoteTree
from fzero.components.remote.link import Arguments
from fzero.components.remote.operands import cotangent_for, inputs_for
from fzero.components.remote.wire import Skeleton, unpacked
from fzero.engine.pullback import used_up
from fzero.table.counting import Counts


def handles(made: Made, skeletons: Sequence[Skeleton]) -> list[Any]:
    """The trees of skeletons with a handle for each leaf."""
    place = itertools.count(1)
    return [unpacked(each, [Handle(made, next(place)) for _ in range(each.places)]) for each in skeletons]


class RemotePullback(Away):
    """What `vjp` of a component returns: it takes the outputs' cotangent, and returns (grads, input cotangents).

    Attributes:
        alone: whether the output is one floating scalar.
    """

    def __init__(
        self, component: Owner, made: Made, outputs: Skeleton, inputs: Skeleton, wanted: Any, alone: bool
    ) -> None:
        super().__init__(made, 0)
        self._component, self._inputs, self._wanted, self.alone = component, inputs, wanted, alone
        self.structure = pytree.flatten(unpacked(outputs, [None] * outputs.places))[1]
        self._used, self._half = False, False

    def __call__(self, cotangent: object, retain_graph: bool = False) -> tuple[RemoteTree, tuple[Any, ...]]:
        """Pulls a cotangent of the outputs back.

        Args:
            cotangent: the outputs' structure, of tensors and handles of any component; `None` counts as zero.
            retain_graph: keep what is needed to call again.

        Returns:
            grads, and a tuple with one tree of handles per input, `None` where it was not differentiated.
        """
        made = self._pulled(cotangent, retain_graph, "both")
        return RemoteTree(made, 0), self.input_handles(made)

    def inputs(self, cotangent: object, retain_graph: bool = False) -> tuple[Any, ...]:
        """The first half: the inputs' cotangents; `params()` then gives the grads."""
        made = self._pulled(cotangent, retain_graph, "inputs")
        self._half = True
        return self.input_handles(made)

    def params(self) -> RemoteTree:
        """The second half: the grads for the cotangent that `inputs` was given."""
        if not self._half:
            raise RuntimeError(
                "pullback.params: got a call before pullback.inputs(cotangent), expected one after it. Call "
                "pullback.inputs first, or pullback(cotangent) for both."
            )
        self._half = False
        options = {"halves": "params", "retain_graph": False}
        return RemoteTree(self._component.made("pull", {"objects": {"pullback": self}, "options": options}), 0)

    def _pulled(self, cotangent: object, retain_graph: bool, halves: str) -> Made:
        need_bool(retain_graph, "pullback", "retain_graph")
        if self._used:
            raise RuntimeError(used_up("this forward"))
        given = cotangent_for(self._component.group, cotangent, self.structure)
        options = {"halves": halves, "retain_graph": retain_graph}
        made = self._component.made("pull", {"objects": {"pullback": self}, "options": options}, given)
        self._used = not retain_graph
        return made

    def input_handles(self, made: Made) -> tuple[Any, ...]:
        """Of each input the tree of its handles, None where it was not differentiated, and in place of constants."""
        leaves = [Handle(made, place) if wanted else None for place, wanted in enumerate(self._wanted, 1)]
        own = lambda x: x if isinstance(x, Handle) else None
        trees = [pytree.map_leaves(own, tree) for tree in unpacked(self._inputs, leaves)]
        return tuple([tree if any(isinstance(x, Handle) for x in pytree.flatten(tree)[0]) else None for tree in trees])

    def __repr__(self) -> str:
        return f"RemotePullback({self.component.name!r}, call {self.made.call})"


class RemotePasses:
    """What a pipeline asks of a stage that is a component: as `fzero.engine.passes.Passes`, by handles, at once.

    An error of a microbatch is raised where the grads are used.
    """

    def __init__(self, component: Owner, state: Away, count: int, rng: int, at_once: bool) -> None:
        self._component, self.count, self.counts = component, count, Counts()
        options = {"count": count, "rng": rng, "at_once": at_once}
        self._passes = Away(component.made("passes", {"objects": {"state": state}, "options": options}), 0)
        self._runs: dict[int, RemotePullback] = {}
        self._done: list[Away] = []  # what must have gone well before there are grads

    def forward(self, microbatch: int, inputs: Sequence[object], wanted: Iterable[int] = ()) -> tuple[Any, Any]:
        """(outputs, aux) of one microbatch, whose pullback is kept."""
        given, own = inputs_for(self._component.group, inputs, "forward"), tuple(wanted)
        options = {"microbatch": microbatch, "wanted": own}
        made, (skeletons, real, _) = self._component.called(
            "pass_forward", {"passes": self._passes}, options, given, own
        )
        outputs, aux = handles(made, skeletons)
        self._runs[microbatch] = RemotePullback(self._component, made, skeletons[0], given.skeleton, real, False)
        return outputs, aux

    def outputs(self, microbatch: int, inputs: Sequence[object]) -> tuple[Any, Any]:
        """(outputs, aux) of one microbatch without gradients."""
        given = inputs_for(self._component.group, inputs, "forward")
        options = {"microbatch": microbatch, "wanted": None}
        outputs, aux = handles(*self._component.called("pass_forward", {"passes": self._passes}, options, given))
        return outputs, aux

    def backward(self, microbatch: int, cotangent: object, retain_graph: bool = False) -> tuple[Any, ...]:
        """The cotangents of a microbatch's inputs, one per input, None where it was not differentiated."""
        return self._pull(microbatch, cotangent, retain_graph, "both")

    def inputs(self, microbatch: int, cotangent: object, retain_graph: bool = False) -> tuple[Any, ...]:
        """The first half of `backward`."""
        return self._pull(microbatch, cotangent, retain_graph, "inputs")

    def _pull(self, microbatch: int, cotangent: object, retain_graph: bool, halves: str) -> tuple[Any, ...]:
        run = self._runs[microbatch] if retain_graph else self._runs.pop(microbatch)
        options = {"microbatch": microbatch, "halves": halves, "retain_graph": retain_graph}
        objects = {"passes": self._passes, "pullback": run}
        given = cotangent_for(self._component.group, cotangent, run.structure)
        made = self._component.made("pass_pull", {"objects": objects, "options": options}, given)
        self._done.append(Away(made, 0))
        return run.input_handles(made)

    def params(self, microbatch: int) -> None:
        """The second half: its gradients."""
        self._note("pass_params", {"microbatch": microbatch})

    def reduce(self) -> None:
        """Reduces the sum of all microbatches, once all have been pulled back."""
        self._note("pass_reduce", {})

    def begin(self) -> None:
        """Forgets what an earlier pullback, which may have failed, has left of its sums."""
        self._done.clear()
        self._note("pass_begin", {})

    def _note(self, verb: str, options: Arguments) -> None:
        made = self._component.made(verb, {"objects": self._objects(), "options": options})
        self._done.append(Away(made, 0))

    def _objects(self) -> Arguments:
        return {"passes": self._passes, **{f"done {number}": own for number, own in enumerate(self._done)}}

    def grads(self, times: float = 1.0) -> RemoteTree:
        """The gradients of all microbatches, which have been reduced."""
        made = self._component.made("pass_grads", {"objects": self._objects(), "options": {"times": times}})
        self._done.clear()
        return RemoteTree(made, 0)
