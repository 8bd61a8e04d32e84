"""A trial of a function before its real run: both must be alike, and nothing of the trial may outlive it.

The trial has a graph, as some operations ask for one (`h.register_hook`, `torch.autograd.grad`), draws the same random
numbers, and is dropped. What differs in the real run (a clock, a counter, Python's generator) was decided outside of
the arguments. What is still alive was put into something outside (a list, an attribute), where whoever reads it would
take the trial's value for its own.

Source:
    `jax.checking_leaks` looks for tracers that are alive in the same way.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeGuard

import torch

from fzero.base import private, pytree
from fzero.base.ambient import functions_seen
from fzero.base.carriers import VALUES
from fzero.base.node import OWNER
from fzero.base.places import Place
from fzero.base.random import seeded
from fzero.base.rebound import tensors_inside
from fzero.base.refusals import heard, is_ours, noted
from fzero.base.thread_state import without_dispatch_modes, without_users_modes
from fzero.purity.collectives import current as collectives
from fzero.purity.observer import Impure, Look, NameOf, Operation, Seen, beside, gone, memory_of, refusing
from fzero.table.handle import StandIn

Run = Callable[[Sequence[torch.Tensor]], Sequence[object]]  # given tensors -> its flat result
_CLOSE = 1e-3  # of outputs where operators are not deterministic
_WAITS = 0.0, 0.01, 0.05, 0.2, 0.5


class Trial:
    """Runs a function once before its real run.

    Args:
        who: names it.
        run: the function; `given` are the tensors that it is called with.
        given: its leaves, which lie in `memories`, and other tensors.
        memories: buffers, each with what names a tensor in it.
        seed: of its random numbers; None: as they come.
        unit: whether it is a unit, which captures constants only.
        outer: the tensors among `given` as the caller has them, if `run` passes on those that it is given instead.
        defined: where the function is defined.

    Attributes:
        look: at the latest run.
        opaque: types of what it returns that is neither a tensor nor a number.
        reruns: whether its pullback may run parts of it again.

    Raises:
        ValueError: it writes to something, captures what is differentiated, or keeps what it has computed.
    """

    def __init__(
        self,
        who: str,
        run: Run,
        given: Sequence[torch.Tensor],
        memories: Sequence[tuple[torch.Tensor, NameOf]] = (),
        seed: int | None = None,
        unit: bool = True,
        outer: Sequence[torch.Tensor] | None = None,
        defined: Place | None = None,
    ) -> None:
        self._who, self._given, self._seed, self._defined = who, given, seed, defined
        self._unit, self._outer = unit, {id(x) for x in outer or ()}
        self._names = names_of(given, memories)
        with refusing(who, defined):
            with _beside():
                before = _content(given)
            passes = outer is not None
            own = [x.view_as(x) if x.layout == torch.strided else x.clone() for x in given] if passes else [*given]
            look = self._look(own)
            look.made += [Seen(gone(x, False), x.shape, 0, None) for x in own if passes]
            with seeded(seed), heard(), without_users_modes(), look:  # they count the real run
                out = _run(run, own)
            with _beside(), torch.no_grad():
                self._kept = [private.unwrapped(x).clone() for x in out if _is_tensor(x)]
            opaque = [x for x in out if not isinstance(x, (torch.Tensor, *VALUES))]
            self.opaque = {type(x) for x in opaque}
            set_on = [[value for name, value in vars(x).items() if name != OWNER] for x in own]
            del out
            own.clear()
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                torch.clear_autocast_cache()
            if (rule := collectives.get()) is None or rule.error is None:
                _need_gone(look, opaque)
            del set_on
            with _beside():
                _need_same(given, before, look, self._names)
        self.look, self.reruns = look, look.reruns

    def _look(self, given: Sequence[torch.Tensor]) -> Look:
        return Look(self._names, {id(x) for x in given} if self._unit else None, self._outer)

    def compared(self, run: Callable[[], Sequence[object]]) -> Sequence[object]:
        """The flat result of the real run, which must be as the trial was."""
        with refusing(self._who, self._defined), seeded(self._seed):
            try:
                out = self._again(run, self._look(self._given))
            except Exception as error:
                if not is_ours(error) and not isinstance(error, Impure):
                    error.add_note(f"{self._who} did not raise this in a first run, with the same arguments.")
                raise
            with _beside():
                _need_same_values(self._kept, out)
        return out

    def keep(self, out: Sequence[object]) -> None:
        """Keeps of the real run what `repeated` compares, and no tensor."""
        self._sums, self._given, self._kept = _sums_of(out), (), ()

    def repeated(
        self,
        run: Callable[[], Sequence[object]],
        given: Sequence[torch.Tensor],
        memories: Sequence[tuple[torch.Tensor, NameOf]],
    ) -> Sequence[object]:
        """The flat result of a second run, in a pullback, which must compute what the real one has."""
        with refusing(self._who, self._defined), seeded(self._seed):
            out = self._again(run, Look(names_of(given, memories), ()))
            pairs = zip(self._sums, now := _sums_of(out), strict=False)
            close = all(a == b or a != a or abs(a - b) <= _CLOSE * abs(a) for a, b in pairs)
            if len(now) != len(self._sums) or not close:
                what = "returned other values when it ran again (fz.remat, a derivative of a derivative)"
                raise Impure(what, None, "Let nothing but its arguments decide what it computes.")
            return out

    def _again(self, run: Callable[[], Sequence[object]], look: Look) -> Sequence[object]:
        """Runs what has run before, and refuses what is not the same."""
        before, self.look = self.look, look
        with heard(), look:
            out = run()
        _need_same_operations(before.operations, look.operations)
        for memory, each in look.captured.items():
            was = before.captured.get(memory)
            if was is not None and was.version != each.version:
                raise Impure(
                    "reads a tensor that it closes over when it runs again, with the same arguments, and that has been "
                    "written to since",
                    each.place,
                    "Give it to the call as an argument.",
                )
        return out


def _sums_of(out: Sequence[object]) -> list[float]:
    """The sums of magnitudes of the tensors among what a function returned."""
    with _beside(), torch.no_grad():
        tensors = [private.unwrapped(x).detach() for x in out if _is_tensor(x)]
        reals = [(x.byte() if x.dtype == torch.bool else pytree.as_reals(x)) for x in tensors if _has_values(x)]
        return [float(x.abs().sum(dtype=torch.float64)) for x in reals]


def _is_tensor(x: object) -> TypeGuard[torch.Tensor]:
    return isinstance(x, torch.Tensor) and not isinstance(x, StandIn)


def _has_values(x: torch.Tensor) -> bool:
    return x.layout == torch.strided and not x.is_meta and not private.is_fake(x) and not x.is_quantized


def names_of(given: Sequence[torch.Tensor], memories: Sequence[tuple[torch.Tensor, NameOf]]) -> dict[int, NameOf]:
    """Memory -> what names a tensor in it."""
    names: dict[int, NameOf] = dict.fromkeys([memory_of(private.unwrapped(x)) for x in given], lambda _: "an input")
    return names | {memory_of(private.unwrapped(x)): name for x, name in memories}


def _run(run: Run, given: Sequence[torch.Tensor]) -> Sequence[object]:
    try:
        return run(given)
    except Exception as error:  # which somebody around may catch
        if not (is_ours(error) or isinstance(error, Impure)) and tensors_inside([error.args, vars(error)]):
            instead = "Return the tensor, or raise an error with numbers in it."
            raise noted(Impure("raises an error that carries a tensor", None, instead)) from error
        raise


@contextlib.contextmanager
def _beside() -> Iterator[None]:
    """Inside, nobody looks at what is computed, and no transform goes through it."""
    with beside(), without_dispatch_modes(), private.below_transforms(), functions_seen.nowhere():
        yield


def _need_gone(look: Look, opaque: list[object]) -> None:
    """Refuses what outlives the trial, but for the objects that it has returned, which hold no tensors."""
    alive = _alive(look)
    if alive and opaque:
        raise Impure(
            f"returns an object of type {' or '.join(sorted({type(x).__name__ for x in opaque}))} that holds tensors",
            alive[0].place,
            "Return what pytrees are made of (a tuple, a list, a dict, a NamedTuple, a dataclass), and no generator.",
        )
    if alive:
        made = next((each for each in alive if each.place is not None), alive[0])
        raise Impure(
            f"keeps a tensor of shape {tuple(made.shape)} that it computed or was given, in something that outlives it "
            "(a list, a dict, an attribute, a global, saved-tensor hooks that keep what they are given)",
            made.place,
            "Return it. A module's own state is a buffer: fz.functional(module, buffers=True).",
        )


def _alive(look: Look) -> list[Seen]:
    alive = [made for made in look.made if not made.is_gone()]
    for seconds in _WAITS:
        if not alive:
            break
        time.sleep(seconds)  # for ranks that are threads, and let go of what was sent
        gc.collect()  # of cycles; it does nothing while another thread's is under way
        alive = [made for made in alive if not made.is_gone()]
    return alive


Content = tuple[int, int, bool, str]


def _content(tensors: Sequence[torch.Tensor]) -> list[Content]:
    """What shows a write that no operation tells of (x.numpy()[:] = 0, x.data = y)."""
    found = []
    for x in tensors:
        plain = private.unwrapped(x).detach()
        strided = _has_values(plain)
        total = str(float(pytree.as_reals(plain).sum(dtype=torch.float64))) if strided else ""  # a NaN is one again
        found.append((plain.data_ptr() if strided else 0, private.version(plain), x.requires_grad, total))
    return found


def _need_same(
    given: Sequence[torch.Tensor], before: Sequence[Content], look: Look, names: Mapping[int, NameOf]
) -> None:
    for x, was, now in zip(given, before, _content(given), strict=True):
        if was != now:
            raise Impure(
                f"changes {names[memory_of(private.unwrapped(x))](x)} in a way that autograd does not see (x.data, "
                "x.numpy(), requires_grad_)",
                look.operations[-1].place if look.operations else None,
                "Compute with a copy: x = x.clone().",
            )


def _need_same_operations(first: Sequence[Operation], second: Sequence[Operation]) -> None:
    for a, b in itertools.zip_longest([x for x in first if x.depends], [x for x in second if x.depends]):
        if a is None or b is None:
            (extra,) = filter(None, (a, b))
            raise _differs(f"calls {_called(extra)} in one of two runs with the same arguments", extra.place)
        if (a.name, a.numbers) != (b.name, b.numbers):
            what = f"calls {_called(a)} in one run and {_called(b)} in the next, with the same arguments"
            raise _differs(what, b.place)


def _need_same_values(kept: Sequence[torch.Tensor], out: Sequence[object]) -> None:
    tensors = [private.unwrapped(x).detach() for x in out if _is_tensor(x)]
    forms = [[(tuple(x.shape), x.dtype) for x in each] for each in (kept, tensors)]
    if forms[0] != forms[1]:
        raise _differs(f"returns tensors of {forms[0]} in one run and of {forms[1]} in the next", None)
    if not all(map(_alike, tensors, kept)):
        raise _differs("returns other values in a second run with the same arguments", None)


def _differs(what: str, place: Place | None) -> Impure:
    return Impure(
        what,
        place,
        "A clock, a counter, a file, a random generator of your own, or a TorchDispatchMode that is around it decides "
        "something. Take what changes as an argument, and draw random numbers from torch's default generator.",
    )


def _called(operation: Operation) -> str:
    shown = [x for x in operation.numbers if isinstance(x, str) and x != "None"]  # a generator's state is long
    return f"{operation.name.partition('::')[2]}({', '.join(shown)})"


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.is_meta or private.is_fake(x):
        return True
    if x.layout != torch.strided:
        x, y = x.to_dense(), y.to_dense()
    close = _CLOSE if x.device.type != "cpu" else 0.0
    return torch.equal(x, y) or bool(torch.isclose(x, y, rtol=close, atol=close, equal_nan=True).all())
