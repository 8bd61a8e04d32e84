"""What a function's graph calls besides torch's operators: messages between ranks, and what draws random numbers."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence

import torch

from fzero.base import private, pytree
from fzero.base.context import during, variable
from fzero.base.operators import Operator, kind_of
from fzero.base.random import Later, seeded
from fzero.comm.axis import Axis
from fzero.graph import of_torch
from fzero.graph.messages import Messages
from fzero.graph.of_torch import TorchDispatchMode
from fzero.graph.operators import like

# the axes of the run that is under way
_axes: contextvars.ContextVar[Sequence[Axis]] = variable("axes_of_run", ())


class Hosts(Messages):
    """Those of one function's graph, and the axes that they are sent over.

    Args:
        given: the axes of the states that the function is given.
    """

    def __init__(self, given: Sequence[Axis]) -> None:
        super().__init__()
        self.axes = [*given]
        self._given = len(given)
        self.streams = 0  # that random numbers are drawn from here, one inside of the other
        self._origins: dict[int, Axis] = {}  # of components that begin in the function

    def begun(self, axis: Axis, origin: Axis) -> Axis:
        """The axis of a component that begins in the function: in each run it is another one."""
        self._origins[len(self.axes)] = origin
        self.axes.append(axis)
        return axis

    def place_of(self, axis: Axis) -> int:
        """The number of an axis."""
        for place, own in enumerate(self.axes):
            if own is axis or (axis.identity and own.identity == axis.identity):
                return place
        self.axes.append(axis)
        return len(self.axes) - 1

    def axes_of_run(self, given: Sequence[Axis]) -> list[Axis]:
        """The axes of one run, which all ranks begin."""
        out = [*given, *self.axes[self._given :]]
        for place, origin in self._origins.items():
            out[place] = origin.of_component(self.axes[place].component)
        return out

    def running(self, axes: Sequence[Axis], updates: Sequence[int]) -> during[Sequence[Axis]]:
        """Around a run.

        Args:
            updates: of each state that is given, how many it has had.
        """
        counts = [*updates, *[0] * (len(axes) - len(updates))]
        own = [axis.of_next_run(count) for axis, count in zip(axes, counts, strict=True)] if self else []
        return during(_axes, own)

    def sent(
        self, axis: Axis, verb: str, x: torch.Tensor, rows: int | None, tag: object, *dtype: torch.dtype
    ) -> torch.Tensor:
        """The result of `axis.verb(x, tag, *dtype)`, a message between ranks.

        Args:
            rows: its leading dim; None where it has the shape of `x`.
        """
        assert private.in_function() or not private.is_differentiated(x), "a message without its derivative"
        run = lambda own, xs: [getattr(own, verb)(xs[0], tag, *dtype).contiguous()]
        with of_torch.untraced():
            out = x.new_empty(x.shape if rows is None else (rows, *x.shape[1:]), dtype=(*dtype, x.dtype)[0])
        return self.over(axis, run, [x], [out])[0]

    def over(
        self,
        axis: Axis,
        run: Callable[[Axis, Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        xs: Sequence[torch.Tensor],
        likes: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:
        """What `run(axis, xs)` makes of tensors, in the forms of others: messages over the axis of a run."""
        place, whole = self.place_of(axis), axis.group is None
        here = lambda: _axes.get()[place].uncut if whole else _axes.get()[place]
        return self.host(lambda own: run(here(), own), xs, likes)

    def of_count(
        self, run: Callable[[int, Sequence[torch.Tensor]], Sequence[torch.Tensor]], count: torch.Tensor,
        xs: Sequence[torch.Tensor], likes: Sequence[torch.Tensor],
    ) -> list[torch.Tensor]:  # fmt: skip
        """What `run(count, xs)` makes of a number that a run knows, and of tensors, in the forms of others."""
        return self.host(lambda own: run(int(own[0]), own[1:]), [private.unwrapped(count), *xs], likes)

    def drawing(self, seed: int) -> Drawing:
        """Around operators that draw random numbers by a seed."""
        return Drawing(self, seed)


# whether an operator runs for the shapes of its results alone, of which the streams around it know nothing
_looking: contextvars.ContextVar[bool] = variable("looking_at_shapes", False)


class Drawing(TorchDispatchMode):
    """Inside a trace: what draws random numbers draws them from one stream, whose state is a value of the graph.

    Args:
        seed: that the stream begins with.
    """

    def __init__(self, hosts: Hosts, seed: int) -> None:
        super().__init__()
        self._hosts, self._seed = hosts, seed
        self._states: dict[torch.device, torch.Tensor] = {}

    def __enter__(self) -> Drawing:
        self._hosts.streams += 1
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self._hosts.streams -= 1
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Operator, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kind, kwargs = kind_of(func), kwargs or {}
        flat, spec = pytree.flatten((args, kwargs))
        if _looking.get() or not kind.draws(args, kwargs) or any(isinstance(x, torch.Generator) for x in flat):
            return func(*args, **kwargs)
        places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        devices = [x for x in flat if isinstance(x, torch.device)]
        device = flat[places[0]].device if places else devices[0] if devices else torch.device("cpu")

        def called(xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            filled = list(flat)
            for place, x in zip(places, xs, strict=True):
                filled[place] = like(flat[place]).copy_(x) if kind.targets else x  # it fills in the order of memory
            own, named = pytree.unflatten(spec, filled)
            return pytree.leaves(func(*own, **named))

        def run(xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            region = seeded(0, {device: xs[0]})
            with region:
                return [*called(xs[1:]), region.state(device)]

        state = self._states.get(device)
        if state is None:
            state = self._begun(device)
        given = [flat[place] for place in places]
        with of_torch.untraced(), during(_looking, True):
            outs = called([like(x) for x in given])
        *found, self._states[device] = self._hosts.host(run, [state, *given], [*outs, state])
        for target, x in zip(written := kind.written(args, kwargs), found, strict=False):
            target.copy_(x)
        return written[0] if written else found[0] if len(found) == 1 else tuple(found)

    def _begun(self, device: torch.device) -> torch.Tensor:
        """The state of the stream before anything is drawn."""
        seed = self._seed
        numbers = [x for x in seed.numbers if isinstance(x, torch.Tensor)] if isinstance(seed, Later) else []
        count = numbers[0] if numbers else torch.zeros((), device="cpu")

        def run(count: int, _: object) -> Sequence[torch.Tensor]:
            own = seed.of(count) if isinstance(seed, Later) else seed
            return [torch.Generator(device).manual_seed(own).get_state()]

        return self._hosts.of_count(run, count, (), [torch.Generator(device).get_state()])[0]
