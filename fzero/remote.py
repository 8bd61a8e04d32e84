"""fz.remote: a component on ranks of its own, threads, processes or Ray's; and fz.fetch, which waits for its values."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fzero.base.arguments import need_bool, need_int, need_number, need_str, wrong
from fzero.components.remote import component, on_ray, processes, threads
from fzero.components.remote.component import RemoteComponent
from fzero.components.remote.group import Group
from fzero.components.remote.link import Link, Settings
from fzero.components.remote.specs import need_specs
from fzero.table.needs import is_component


def remote(
    build: Callable[[int], object],
    ranks: int = 1,
    on: str = "processes",
    name: str | None = None,
    timeout: float = 60.0,
    checked: bool = False,
    options: Mapping[str, Any] = MappingProxyType({}),
    in_specs: object = None,
    out_specs: object = None,
) -> RemoteComponent:
    """A component that lives elsewhere: a step on ranks of its own, with a step's verbs.

    Seen from outside it is its function on the whole batch in one process: tensors of inputs are split along dim 0 over
    the data ranks (those that the step takes means over), tensors of outputs joined, scalars averaged by examples;
    grads and input cotangents are exactly that function's. Calls return at once, and what they make are handles;
    `fz.fetch` waits; the first call of a kind (shapes, constants) waits for its outputs' tree. An input that is a
    handle of another component comes straight from its ranks.

    Calls and values go by shared memory on one machine, and between machines by TCP. Where a rank of Ray's cannot be
    connected to, or cannot connect to its controlling process (a firewall that lets Ray's own ports through), Ray's
    calls and its object store carry the same messages; each such pair is logged once as a warning of
    "fzero.components", and waiting for a silent port takes 5 seconds for each machine. Calls and values take several
    times as long then. The ranks of one component must reach one another: their process group is gloo's.

    A floating scalar is taken for a mean over examples: a sum, a maximum or a ratio of a rank's share would be
    averaged, too. Integers without dims and numbers of Python, which may count a rank's share, are refused where there
    are several, and so are NaN of a batch of which some ranks have no example. What is given may be written to
    afterwards: it is copied, on threads, too. Functions compute new tensors, and write to none that they are given.
    Inputs and cotangents are brought to the device that a rank's params lie on; between processes of one GPU they go by
    CUDA IPC, and never through the host. What `fz.fetch` gives lies on the CPU.
    Autocast around a call reaches no rank, and is refused (`fz.autocast` in `build`). The default dtype is that of the
    start.

    With `in_specs` and `out_specs` tensors lie over any axes of a mesh, as in JAX's shard_map: a rank's function is
    given its pieces of the inputs and returns its pieces of the outputs. A scalar is averaged by how much of what is
    cut each rank has; one that is a mean over something else, say tokens of ragged examples, must be put together in
    the function (`fz.parallel.weighted_mean` over the data axes). The rows of an `fz.Ragged` go where its lengths go;
    with `fz.Ragged(PartitionSpec(("dp", "sp")), PartitionSpec("dp"))` those of a rank's examples lie over a further
    axis.

    Args:
        build: `build(rank) -> (step, params)`, called on every rank, in a process group of its own (gloo). With a third
            value, `fz.parallel.axis(mesh, name)`, batches are split over that axis alone; ranks beside it get the same
            examples. A DeviceMesh as third value has the axes for specs. Under "processes" it must be picklable:
            defined at the top of a module.
        ranks: their number.
        on: "threads" of this process, "processes" on this machine, or "ray": one actor for each rank, in a placement
            group.
        name: in errors; that of `build` by default.
        timeout: seconds that the start, one call or one collective may take.
        checked: compare what ranks communicate first (`fz.testing.checked_collectives`): a rank that fails alone then
            costs the call, and not the component. Unchecked it costs the component within seconds, where another one
            waits for it in a collective.
        options: under "processes" and "ray" the "backend" of the process group, "gloo" by default; with "nccl" what
            lies on GPUs goes by that one, and each rank needs a GPU of its own, which `build` chooses
            (torch.cuda.set_device) unless Ray does. Under "ray", too: "resources" of each rank, {"CPU": 1} by default,
            "strategy" of the placement group, "PACK" by default, and "runtime_env".
        in_specs: how inputs lie over the ranks: a tuple with a spec for each, or one for all; a spec is a
            `fz.PartitionSpec` for all tensors of an input, or containers of them as the input's own. None is
            `PartitionSpec()`: whole on every rank.
        out_specs: likewise of what the function returns, aux included; what is said to be whole must be the same on all
            ranks. Both or neither.

    Raises:
        ValueError: a spec names an axis that is not in the mesh, or over which the step neither takes means nor has its
            leaves cut.
        ImportError: `on` is "ray", which is not installed.
        ComponentDied: at any later use, once a rank has ended.
        Exception: what `build` raised on a rank.

    Example:
        >>> def build(rank):
        ...     step = fz.train_step(lambda p, x: (p["w"] * x).sum(1), fz.sgd(0.1))
        ...     return fz.shard_zero3(step), {"w": torch.ones(3)}
        >>> with fz.remote(build, ranks=2, on="threads") as component:
        ...     state = component.init()
        ...     outputs, pullback = component.vjp(state, torch.ones(3, 3))
        ...     grads, _ = pullback(torch.ones_like(outputs))
        ...     fz.fetch(outputs), fz.gather(grads)["w"]
        (tensor([3., 3., 3.]), tensor([3., 3., 3.]))
        >>> def build(rank):  # each rank has some tokens of all examples
        ...     mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
        ...     step = fz.train_step(lambda p, x: torch.tanh(x @ p["w"]), fz.sgd(0.1))
        ...     return fz.shard_zero2(step, mesh, axis=("dp", "sp")), {"w": torch.ones(3, 4)}, mesh
        >>> tokens = fz.PartitionSpec("dp", "sp")
        >>> with fz.remote(build, ranks=2, on="threads", in_specs=tokens, out_specs=tokens) as component:
        ...     component.forward(component.init(), torch.ones(2, 5, 3)).shape
        torch.Size([2, 5, 4])
    """
    need_int(ranks, "remote", "ranks", "a number of ranks", least=1)
    need_number(timeout, "remote", "timeout", "a number of seconds")
    need_bool(checked, "remote", "checked")
    need_str(name, "remote", "name", "a str or None", or_none=True)
    if not 0 < timeout <= 1e7:
        raise ValueError(f"remote: got timeout={timeout}, expected a positive number of seconds, at most 10 million.")
    if not callable(build) or is_component(build):
        raise wrong("remote", "build", build, "a function build(rank) -> (step, params)")
    starts: dict[str, Callable[..., Sequence[Link]]] = {"threads": threads.start, "processes": processes.start}
    starts["ray"] = functools.partial(on_ray.start, options=options)
    if not isinstance(on, str) or on not in starts:
        raise ValueError(f"remote: got on={on!r}, expected one of {', '.join(map(repr, starts))}.")
    if not isinstance(options, Mapping):
        raise wrong("remote", "options", options, "a dict of options of Ray")
    known = {"threads": set(), "processes": {"backend"}, "ray": {"backend", *on_ray.OPTIONS}}[on]
    if not {*options} <= known:
        raise ValueError(f"remote: got options={sorted(options)} on={on!r}, expected some of {sorted(known)}.")
    backend = options.get("backend", "gloo")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"remote: got options={{'backend': {backend!r}}}, expected 'gloo' or 'nccl'.")
    need_specs(in_specs, out_specs)
    label = name or getattr(build, "__name__", None) or type(build).__name__
    own = ranks, float(timeout), torch.get_num_threads(), checked, torch.get_default_dtype(), in_specs, out_specs
    settings = Settings(label, uuid.uuid4().hex, *own, backend)
    group = Group(settings)
    group.start(functools.partial(starts[on], build, settings))
    return RemoteComponent(group)


def fetch(tree: Any) -> Any:
    """Waits for the values of handles.

    Args:
        tree: any pytree.

    Returns:
        The same tree with plain tensors on the CPU in place of handles; states and grads are waited for, and stay
        where they are.

    Raises:
        ComponentDied: a component that one lies on is lost.
        Exception: the call that was to make it failed.

    Example:
        >>> fz.fetch({"loss": torch.ones(2), "n": 3})
        {'loss': tensor([1., 1.]), 'n': 3}
    """
    return component.fetch(tree)
