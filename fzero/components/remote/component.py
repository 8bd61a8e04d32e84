"""A component on ranks of its own, with a step's verbs: calls return at once, and what they make stays there."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import named, need_argnums, need_int, wrong
from fzero.components.remote.group import Group
from fzero.components.remote.handle import Away, Made, RemoteState, RemoteTree, Value, absolute
from fzero.components.remote.link import Arguments, Kept
from fzero.components.remote.operands import Given, inputs_for, is_value, norm_for
from fzero.components.remote.pullback import RemotePasses, RemotePullback, handles
from fzero.components.remote.wire import Skeleton


class Span(NamedTuple):
    """One call that a rank ran.

    Attributes:
        verb: "vjp", "pull", "update", ...; within a pipeline "pass_forward", "pass_pull", "pass_params", ...
        microbatch: of a pipeline's call, -1 of others.
        half: of a pullback "both", "inputs" or "params"; "" of others.
        start, end: in seconds.
    """

    verb: str
    microbatch: int
    half: str
    start: float
    end: float


class RemoteComponent:
    """A step on ranks of its own. Made by `fz.remote`, used as a step is, and in a `with`, which closes it.

    Seen from outside it is its function on the whole batch in one process. Calls return at once and run in order. What
    they return are handles of values that stay there and never change. An error of a call is raised where its results
    are used.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.name = group, group.settings.component
        self._kinds = Kept[object, tuple[int, list[Any]]]()
        self._count = itertools.count()
        self._end = weakref.finalize(self, group.close)

    def close(self) -> None:
        """Ends the ranks. What lies there is lost. You may call it again."""
        self.group.close()

    def __enter__(self) -> RemoteComponent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RemoteComponent({self.name!r}, {self.group.settings.ranks} ranks)"

    # ---- a step's verbs

    def init(self, seed: int = 0) -> RemoteState:
        """Makes the state for the params that `build` returned.

        Args:
            seed: as in `Step.init`.
        """
        return RemoteState(self.made("init", {"options": {"seed": need_int(seed, "init", "seed")}}), 0)

    def vjp(
        self, state: RemoteState, *inputs: object, argnums: int | Sequence[int] | None = None, rng: int = 0
    ) -> tuple[Any, RemotePullback, *tuple[Any, ...]]:
        """The outputs and their pullback for the whole batch, as handles.

        Args:
            state: a state of this component.
            *inputs: the whole batch. Tensors are split along dim 0 over the data ranks, those without dims go to all.
                Handles, of any component, are brought from where they lie.
            argnums: as in `Step.vjp`.
            rng: as in `Step.vjp`.

        Returns:
            `(outputs, pullback)`, or `(outputs, pullback, aux)` if the step has aux.
        """
        nothing = torch.empty(0, device="cpu")  # in place of handles, for a check that looks for tensors
        own = need_argnums(argnums, [pytree.map(lambda x: nothing if is_value(x) else x, tree) for tree in inputs])
        options = {"argnums": own, "rng": need_int(rng, "vjp", "rng")}
        given = inputs_for(self.group, inputs, "vjp")
        made, trees = self.called("vjp", {"state": state}, options, given, own)
        skeletons, wanted, alone = trees
        outputs, *aux = handles(made, skeletons)
        pullback = RemotePullback(self, made, skeletons[0], given.skeleton, wanted, alone)
        return (outputs, pullback, *aux)

    def forward(self, state: RemoteState, *inputs: object, rng: int = 0) -> Any:
        """The outputs without gradients, as `Step.forward`."""
        given = inputs_for(self.group, inputs, "forward")
        made, skeletons = self.called("forward", {"state": state}, {"rng": need_int(rng, "forward", "rng")}, given)
        own = handles(made, skeletons)
        return tuple(own) if len(own) > 1 else own[0]

    def update(
        self, state: RemoteState, grads: RemoteTree, grad_norm: object = None
    ) -> tuple[RemoteState, dict[str, Any]]:
        """Applies grads, as `Step.update`.

        Args:
            state: a state of this component.
            grads: what a pullback of this component returned.
            grad_norm: a norm to clip by, from `fz.global_norm` of several components' grads.
        """
        objects = {"state": state, "grads": self._need_grads(grads, "update")}
        options = {"grad_norm": norm_for(self.group, grad_norm, "update")}
        made, skeletons = self.called("update", objects, options, None)
        return RemoteState(made, 0), _metrics(made, skeletons)

    def add_grads(self, state: RemoteState, grads: RemoteTree) -> RemoteState:
        """Adds grads to those that the state keeps for the next update, as `Step.add_grads`."""
        objects = {"state": self._need_state(state, "add_grads"), "grads": self._need_grads(grads, "add_grads")}
        return RemoteState(self.made("add_grads", {"objects": objects}), 0)

    def __call__(
        self, state: RemoteState, *inputs: object, cotangent: object = None, rng: int = 0
    ) -> tuple[RemoteState, dict[str, Any]]:
        """One update: `(new_state, metrics)`, as a step. Metrics are handles."""
        if cotangent is not None:
            outputs, pullback, *aux = self.vjp(state, *inputs, argnums=(), rng=rng)
            grads, _ = pullback(cotangent)
            new, metrics = self.update(state, grads)
            loss = {"loss": outputs} if pullback.alone else {}
            return new, {**metrics, **loss, **({"aux": aux[0]} if aux else {})}
        given = inputs_for(self.group, inputs, "step")
        made, skeletons = self.called("step", {"state": state}, {"rng": need_int(rng, "step", "rng")}, given)
        return RemoteState(made, 0), _metrics(made, skeletons)

    def passes(self, state: RemoteState, count: int, rng: int = 0, at_once: bool = True) -> RemotePasses:
        """What a pipeline asks of a stage during one call: see `fzero.engine.passes.Passes`."""
        return RemotePasses(self, self._need_state(state, "passes"), count, rng, at_once)

    def spans(self) -> list[Span]:
        """When the first rank ran which calls, since this was last called: the last 4,096 at most. For timelines.

        It waits for the calls before it. Times are seconds of the machine's monotonic clock, which all its processes
        share.
        """
        made = self.made("spans", {})
        return [Span(*each) for each in self.group.trees(made.call, ranks=1)]

    # ---- calls

    def called(
        self, verb: str, objects: Arguments, options: Arguments, given: Given | None, kind: object = None
    ) -> tuple[Made, Any]:
        """A call that returns trees: those of the first of its kind are waited for, later ones are taken for the same.

        Args:
            kind: what the trees depend on beside the inputs.
        """
        if "state" in objects:
            self._need_state(objects["state"], verb)
        about = (verb, kind, *((given.skeleton, given.shapes) if given is not None else ()))
        kind_of = self._kinds.get(about)
        if kind_of is None:
            kind_of = next(self._count), []
            self._kinds[about] = kind_of
        key, known = kind_of
        made = self.made(verb, {"objects": objects, "options": options}, given, key)
        if not known:
            try:
                known.append(self.group.trees(made.call, first=True))
            except BaseException:
                self._kinds.pop(about, None)
                raise
        return made, known[0]

    def made(self, verb: str, arguments: Arguments, given: Given | None = None, key: int = -1) -> Made:
        """Sends a call."""
        objects: dict[str, Away] = arguments.get("objects", {})
        for away in objects.values():
            failure = self.group.failures.get(away.made.call)
            if failure is not None:
                raise self.group.error(failure)
        given = given or Given({}, (), [])
        names = {what: away.name for what, away in objects.items()}
        arguments = {**arguments, **given.arguments, **({"objects": names} if objects else {})}
        return Made(self, self.group.call(verb, arguments, [*objects.values(), *given.held], given.by_rank, key))

    def _need_state(self, state: object, who: str) -> RemoteState:
        if not isinstance(state, RemoteState):
            raise TypeError(f"{who}: got state={named(state)}, expected what init of this component returned.")
        return self._need_own(state, who, "state")

    def _need_grads(self, grads: object, who: str) -> RemoteTree:
        if not isinstance(grads, RemoteTree) or grads.what:
            raise TypeError(
                f"{who}: got grads={named(grads)}, expected the first value that a pullback of this component returned."
            )
        return self._need_own(grads, who, "grads")

    def _need_own(self, away: Any, who: str, what: str) -> Any:
        if away.component is not self:
            raise ValueError(
                f"{who}: got {what} of component {away.component.name!r}, expected those of {self.name!r}, which is "
                "another one. Give each component its own."
            )
        return away

    def load_from(self, path: str, options: Mapping[str, Any]) -> RemoteState:
        """The state of a checkpoint. Use `fz.load(path, component)`."""
        if options.get("like") is not None:
            raise wrong("fz.load", "like", "a tree", "None of a component, whose params are those that build returned")
        own = {name: value for name, value in options.items() if name != "like"}
        made = self.made("load", {"options": {**own, "path": absolute(path)}})
        made.trees()
        return RemoteState(made, 0)


def _metrics(made: Made, skeletons: Sequence[Skeleton]) -> dict[str, Any]:
    metrics, *aux = handles(made, skeletons)
    return {**metrics, **({"aux": aux[0]} if aux else {})}


def fetch(tree: Any) -> Any:
    """The tree with plain tensors in place of handles, which are waited for; states and grads are waited for too."""

    def waited(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return leaf.fetched()
        if isinstance(leaf, (RemoteState, RemoteTree)):
            leaf.made.trees()
        return leaf

    return pytree.map(waited, tree)
