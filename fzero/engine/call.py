"""One call of a unit: arguments and what it reaches go in as plain tensors, outputs and what it changed come out.

A call that is not pure is made so: tensors that it reads in objects enter the node, and what it writes leaves it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap

import torch

from fzero.base import private, refusals, texts
from fzero.base.context import during, in_function
from fzero.base.follow import is_pushed
from fzero.capture.again import Again, Facts, Unread
from fzero.capture.containers import Container, Content, is_same, moved_on
from fzero.capture.contents import replaced, tensors_in
from fzero.capture.exports import Exports, Outlets, alike, built, differs_unseen, geometry, refuse_aliases
from fzero.capture.handle import Handle, storage_of
from fzero.capture.notes import Mark, hand_on, marks_of, notes
from fzero.capture.second_run import SecondRun
from fzero.capture.surroundings import Filling, Reach, Surroundings, put_again, take_out
from fzero.engine.traversal import Present, Traversal, inside
from fzero.table.layout import Key

_UNSEEN = (texts.NO_MEMORY, texts.NO_STORAGE)  # of a tensor that came unseen


class Call:
    """A unit's function with its arguments, as a function of the leaves and tensors that it reaches.

    Attributes:
        facts: what earlier runs showed of this call.
        first: whether nothing is known of it.
        more: handles of leaves that it reads although it is not given them.
    """

    def __init__(
        self,
        fn: Callable[..., object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        surroundings: Surroundings,
        around: Callable[[object], contextlib.AbstractContextManager[object]] | None,
    ) -> None:
        self.fn, self.args, self.kwargs, self.around = fn, args, dict(kwargs), around
        self.reach = Reach((*args, *self.kwargs.values()), surroundings)
        self.facts, self.first = Facts(), True
        self.more: list[Handle] = []
        self._notes, self._noted = notes.get(), list[Mark | None]()
        # the stored buffers of its leaves, as far as is known
        self.primals: dict[Key, torch.Tensor] = {handle.key: handle.primal for handle in self.reach.handles}
        self._second = SecondRun(self.reach)
        self.unit, self.recomputes, self.compiles = "", False, False
        self.confirmed: Callable[[], None] = lambda: None  # called when a second run has found all as it was
        self._fulls: Sequence[torch.Tensor] = ()
        self._moving: set[int] = set()  # places of the tensors that are differentiated
        self._leaves: set[int] = set()  # ids of what the graph of the run begins with
        self._derived, self.given = True, set[int]()  # ids of the tensors that the function is given
        self._forget()

    def _forget(self) -> None:
        self._result: tuple[object] | None = None  # the template of the first run
        self._full: dict[int, int] | None = None  # place of a tensor that is a full leaf -> the leaf's index
        self._effects: list[tuple[Container, Content]] = []
        self._filled: list[tuple[Container, Content]] = []
        self._dressed: dict[int, tuple[type, Content]] = {}  # place of a tensor -> its class, and what was set on it
        self._mutated: tuple[int, ...] = ()
        self._errors: list[BaseException] = []  # that the function kept
        self._changes_some = False
        self._raises = False  # whether the result is an error, to be raised
        self.inner: tuple[tuple[object, ...], Filling] = (), []  # the arguments of the last run, and what was put where
        self._changed: set[int] = set()  # ids of what the function changed
        self._form: Sequence[object] = ()  # of what the function puts out
        self._outlets: Outlets | None = None  # which tensors are put out, and how
        self._gives: list[Mark | None] = []  # how each varies

    def is_alone(self, place: int) -> bool:
        """Tells whether one of its tensors is needed as it is by a run later only, and held in no object."""
        return place not in self.facts.mutated | self.facts.returned and self.reach.is_alone(self.reach.tensors[place])

    def let_go(self, stand_ins: Mapping[int, torch.Tensor]) -> None:
        self.args = tuple(replaced(value, stand_ins) for value in self.args)
        self.kwargs = {name: replaced(value, stand_ins) for name, value in self.kwargs.items()}
        self.reach.let_go(stand_ins)

    def forget(self) -> None:
        vars(self).clear()

    @property
    def known(self) -> Facts:
        return self.facts._replace(mutated=frozenset(self._mutated), draws=self._second.draws)

    @property
    def left(self) -> bool:
        return bool(self._changes_some or self._filled or self._dressed or self._raises)

    # ---- before

    def learn(self, showed: Facts) -> None:
        facts = self.facts.joined(showed)
        assert facts != self.facts
        self._know(facts)
        self.reach.restore()
        self._second.look()
        self._second.refuse(self.unit)
        self._second.rewind()
        self._forget()

    @property
    def owner(self) -> Traversal | None:
        return self.reach.handles[0].owner if self.reach.handles else None

    @property
    def moving(self) -> tuple[int, ...]:
        """Places of the tensors, leaves first, that are differentiated, as far as is known of the call."""
        tensors = (*self.primals.values(), *self.reach.tensors)
        return tuple(i for i, tensor in enumerate(tensors) if private.is_differentiated(tensor))

    def knows(self, traversal: Traversal, facts: Facts | None) -> None:
        self._traversal, self.first, self._record = traversal, facts is None, traversal.schedule.record
        self._know(facts or Facts())
        self._second.begin(self.first, self.facts.draws or self._record.draws)

    def _know(self, facts: Facts) -> None:
        self.facts = facts
        self.reach.reads(facts.read)
        self._noted = marks_of(self._notes, self.reach.tensors)
        self.more = [self._traversal.handle(index) for index in facts.more]
        self.primals.update((handle.key, handle.primal) for handle in self.more)

    def operands(self) -> tuple[tuple[torch.Tensor, ...], list[int]]:
        """The tensors that the node is applied to, and the positions of those that are differentiated.

        Those that the function may change in place are copies, as a second run needs what was there.
        """
        primals = self.primals.values()
        tensors = (*primals, *self.reach.tensors)
        needs = private.is_differentiated if torch.is_grad_enabled() else is_pushed
        wanted = [i for i, tensor in enumerate(tensors) if needs(tensor)]
        derived = bool(wanted) or any(private.is_wrapped(tensor) for tensor in tensors)
        copied = self.facts.mutated | self.facts.returned
        if derived and (self.first or copied):
            count = len(primals)
            tensors = tuple(
                tensor.clone() if i >= count and (i - count in copied or (self.first and i not in wanted)) else tensor
                for i, tensor in enumerate(tensors)
            )
        return tensors, wanted

    # ---- the run

    def run(
        self,
        leaves: Mapping[int, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        fulls: Sequence[torch.Tensor],
        derived: bool,
        unit: str,
        watch: contextlib.AbstractContextManager[object],
    ) -> tuple[torch.Tensor, ...]:
        """Runs where no functorch level is active, and looks whether the function wrote where it should not.

        Args:
            inputs: the tensors; a copy is made of what is changed in place.
            derived: whether something differentiates this run, now or by another one.
        """
        self._fulls, self._derived = fulls, derived
        self._moving = {i for i, x in enumerate(inputs) if x.requires_grad}
        self._leaves = {id(x) for x in (*inputs, *leaves.values())}
        if derived:
            refuse_aliases(unit, self.facts.mutated, self.reach.tensors)
        before, gathered = [private.version(x) for x in inputs], [private.version(full) for full in fulls]
        try:
            out = self.body(leaves, inputs, watch)
        except RuntimeError as error:
            if not texts.says(error, texts.WRITES_LEAF):
                raise
            places = {i for i, x in enumerate(inputs) if x.requires_grad and x.is_leaf}
            if places <= self.facts.mutated:
                raise ValueError(refusals.writes_leaf(unit)) from error
            raise Again(Facts(mutated=frozenset(places))) from None
        finally:
            self._fulls = ()
        if [private.version(full) for full in fulls] != gathered:
            raise ValueError(refusals.writes_leaf(unit))
        changed = frozenset(i for i, x in enumerate(inputs) if private.version(x) != before[i])
        self._changes_some = self._changes_some or bool(changed)
        if derived and not changed <= self.facts.mutated:
            if not self.first:
                raise ValueError(
                    f"Unit {unit!r} changes one of its inputs in place (of shape "
                    f"{tuple(inputs[min(changed - self.facts.mutated)].shape)}), which it did not do when it was "
                    "called here before. Write to a copy: x = x.clone(), or use the operation that is not in place."
                )
            raise Again(Facts(mutated=changed))
        return out

    def body(
        self,
        leaves: Mapping[int, torch.Tensor],
        tensors: Sequence[torch.Tensor],
        watch: contextlib.AbstractContextManager[object] = contextlib.nullcontext(),  # noqa: B008 - has no state
    ) -> tuple[torch.Tensor, ...]:
        """The call as a pure function, under any derivative, and as often as is needed: what it puts out."""
        again = self._result is not None
        if again:
            self._second.refuse(self.unit)
        fresh = self._derived and self.first and not (again or self.compiles or private.level())
        copied = [False] * len(tensors)
        if self._derived:  # a leaf of a graph could not be written to
            copied = [i in self.facts.mutated or (fresh and x.requires_grad) for i, x in enumerate(tensors)]
            tensors = [x.clone() if own else x for x, own in zip(tensors, copied, strict=True)]
        tensors = [alike(x, outer) for x, outer in zip(tensors, self.reach.tensors, strict=True)]
        hand_on(self._notes, self._noted, tensors)
        if self._notes is not None:
            self._notes.note_cut(leaves, self._traversal.layout.rows)
        mapping, shapes = self._mapping(leaves, tensors), [geometry(x) for x in tensors]
        self.given = {*map(id, leaves.values()), *map(id, tensors)}
        origins = {id(inner): outer for outer, inner in zip(self.reach.tensors, tensors, strict=True)}
        origins.update((id(mapping[id(outer)]), outer) for _, outer in self.reach.unread)
        before = self.reach.clear() if again else None
        if before is not None and not (self._second.moved or any(starmap(moved_on, before))):
            self.confirmed()
            self.confirmed = lambda: None
        try:
            filling = self.reach.fill(mapping)
            args = tuple(replaced(value, mapping) for value in self.args)
            kwargs = {name: replaced(value, mapping) for name, value in self.kwargs.items()}
            self.inner = args, filling
            run = functools.partial(self._run, leaves, self._numbers(leaves, tensors), watch, args, kwargs)
            result = self._second.run(run) if again else run()
            if not again:
                self._second.look()
            if self.recomputes and self._derived:
                self._second.refuse(self.unit)
            written = [i for i, own in enumerate(copied) if own and private.version(tensors[i])] if fresh else []
            if not self.facts.mutated.issuperset(written):
                raise Again(Facts(mutated=frozenset(written)))
            if shapes != [geometry(x) for x in tensors]:
                raise ValueError(refusals.reshapes(self.unit))
            if fresh and not private.dispatch_modes() and any(map(differs_unseen, tensors, self.reach.tensors)):
                raise ValueError(refusals.unseen_write(self.unit))
            exports = Exports(self.unit, self.reach.knows, origins)
            template = exports.of(result)
            effects = self._changes(exports)
            self._need_copies({i for i, x in enumerate(self.reach.tensors) if id(x) in exports.returned})
        except BaseException as error:
            if before is not None:
                self.reach.restore(before)
                if isinstance(error, Again):
                    raise ValueError(refusals.another_run(self.unit)) from None
            elif isinstance(error, Again):
                self.reach.restore()
            else:  # whoever catches it finds what the function had done
                changed = [c for c, _ in self.reach.changes()]
                self.reach.leave([c for c in changed if self.reach.entered(c) is c.found])
            if texts.says(error, *refusals.of_derivatives()):
                raise TypeError(refusals.twice(self.unit, error)) from error
            raise
        if before is not None:
            self.reach.restore(before)
        else:
            # what holds none of the unit's tensors stays as the unit left it
            stays = [c for c, now, content in effects if is_same(now, content) and self.reach.entered(c) is c.found]
            self._changes_some = self._changes_some or bool(effects)
            self._effects = [(c, content) for c, _, content in effects if c not in stays]
            self._errors = [x for _, now, _ in effects for x in now.values() if isinstance(x, BaseException)]
            self.reach.leave(stays)
            self._result, self._filled, self._dressed = (template,), exports.filled, exports.dressed
            seen = private.level() == 0  # of what was copied only some may have been changed
            cloned = sorted(self.facts.mutated) if self._derived else ()
            self._mutated = tuple(i for i in cloned if not seen or private.version(tensors[i]))
        out = [*exports.tensors, *[tensors[place] for place in self._mutated]]
        if self._outlets is None:
            own = {storage_of(full) for full in self._fulls}
            count = len(exports.tensors)
            self._gives = marks_of(self._notes, out)
            self._outlets = Outlets(out, count, tensors, self.reach.tensors, own, self._moving, self._leaves)
            self._need_copies(self._outlets.returned)
        form = [(x.shape, x.dtype) for x in out]
        compared = self._derived and (self.recomputes or self.first)
        if (again and form != self._form) or (compared and not self._second.weigh(out, again)):
            self._record.draws = True
            raise ValueError(refusals.another_run(self.unit))
        self._form = form
        return self._outlets.taken(out)

    def _run(
        self,
        leaves: Mapping[int, torch.Tensor],
        numbers: Mapping[int, int],
        watch: contextlib.AbstractContextManager[object],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> object:
        """Returns what the function returns, or the error that it raises, where tensors of its own leave with that."""
        again = self._result is not None
        here = inside(self._here(leaves), (self._traversal, numbers))
        # a second run is one within the step's function too: verbs within it go on by what is differentiated
        with here, during(notes, self._notes), during(in_function, True), watch:
            try:
                with refusals.heard(), refusals.of_higher_order(f"Unit {self.unit!r}"):
                    result = self.fn(*args, **kwargs)
            except Exception as error:
                if not (private.level() or self.facts.watched) and texts.says(error, *_UNSEEN):
                    raise Again(Facts(watched=True)) from None
                if texts.says(error, *texts.FREED):
                    raise ValueError(refusals.freed(f"Unit {self.unit!r}{refusals.place_of(error)}")) from error
                if refusals.is_ours(error) or not (self._raises if again else self._holds_tensors(error)):
                    raise
                self._raises, result = True, error
                return result
        if self._raises:
            raise ValueError(refusals.another_run(self.unit))
        return result

    def _holds_tensors(self, error: Exception) -> bool:
        if refusals.of_compiler(error) or texts.says(error, texts.WRITES_LEAF, *refusals.of_derivatives()):
            return False  # dealt with elsewhere
        changed = [list(now.values()) for _, now in self.reach.changes()]
        return next(tensors_in([error, *changed], self.reach.knows), None) is not None

    def _mapping(self, leaves: Mapping[int, torch.Tensor], tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        mapping = {id(outer): inner for outer, inner in zip(self.reach.tensors, tensors, strict=True)}
        mapping.update((id(handle), leaves[handle.index]) for handle in self.reach.handles)
        mapping.update((id(outer), Unread(outer, place)) for place, outer in self.reach.unread)
        return mapping

    def _numbers(self, leaves: Mapping[int, torch.Tensor], tensors: Sequence[torch.Tensor]) -> dict[int, int]:
        """Id of a leaf that the function is given -> its index."""
        if self._full is None:
            of = self._traversal.origins
            self._full = {place: of[id(x)] for place, x in enumerate(self.reach.tensors) if id(x) in of}
        own = {id(x): index for index, x in leaves.items()}
        return own | {id(tensors[place]): index for place, index in self._full.items()}

    def _here(self, leaves: Mapping[int, torch.Tensor]) -> Present:
        handles = (*self.reach.handles, *self.more)
        return {(handle.owner, handle.index): leaves[handle.index] for handle in handles}

    def _changes(self, exports: Exports) -> list[tuple[Container, Content, Content]]:
        """The containers that the function changed (of a second run: the first one), with content and templates."""
        out, again, changes = [], self._result is not None, self.reach.changes()
        self._changed = self._changed if again else {id(container.of) for container, _ in changes}
        for container, now in changes:
            if id(container.of) not in self._changed:
                continue
            content, entered = {}, self.reach.entered(container)
            for key, value in now.items():
                same = key in entered and entered[key] is value
                content[key] = container.found[key] if same else exports.of(value)
            out.append((container, now, content))
        return out

    @contextlib.contextmanager
    def refilled(self, leaves: Mapping[int, torch.Tensor], inner: tuple[tuple[object, ...], Filling]) -> Iterator[None]:
        """Around the pullback of a kept graph, which may run parts of the function again (torch.utils.checkpoint).

        Args:
            inner: that of the run which made the graph.
        """
        args, filling = inner
        put = put_again(filling)
        try:
            with inside(self._here(leaves)), self.around(args[0]) if self.around else contextlib.nullcontext():
                yield
        finally:
            take_out(put)

    def _need_copies(self, returned: set[int]) -> None:
        """A run later needs these tensors as they were, and the caller, who is given them, may change them."""
        if self.recomputes and self._derived and self.first and not returned <= self.facts.returned:
            raise Again(Facts(returned=frozenset(returned)))

    def finish(self, out: Sequence[torch.Tensor]) -> object:
        """The call's result, from what its node put out; what it changed is changed."""
        assert self._outlets is not None
        recipes = self._outlets.recipes
        changed = [self.reach.tensors[place] for place in self._mutated]
        for x, slot in zip(changed, recipes[len(recipes) - len(changed) :], strict=True):
            x.copy_(out[slot.index])
        tensors = [recipe.outside(out) for recipe in recipes]
        hand_on(self._notes, self._gives, [*tensors[: len(tensors) - len(changed)], *changed])
        for i, (kind, _) in self._dressed.items():
            tensors[i] = tensors[i].as_subclass(kind)
        for i, (_, content) in self._dressed.items():
            vars(tensors[i]).update({name: built(value, tensors) for name, value in content.items()})
        for container, content in (*self._filled, *self._effects):
            container.write({key: built(value, tensors) for key, value in content.items()})
        errors, self._errors = self._errors, []
        for error in errors:
            refusals.clear_frames(error)
        assert self._result is not None
        if isinstance(self._result[0], BaseException) and self._raises:
            raise self._result[0]
        return built(self._result[0], tensors)
