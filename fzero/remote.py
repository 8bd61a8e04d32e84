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
    """Starts a component, with a step's verbs, on ranks of its own: threads, processes, or Ray actors anywhere.

    Seen from outside, it is its function on the whole batch in one process:

    - Tensors of inputs are split along dim 0 over the data ranks, and tensors of outputs are joined. Inputs without
      dims go to all.
    - A floating scalar is averaged over examples. A sum, a maximum or a mean over tokens must be put together in the
      function (`fz.parallel.weighted_mean`). Integers without dims and Python numbers are refused if there are several
      data ranks.
    - Grads and input cotangents are those of that function.

    Calls return at once, and run in order. What they return are handles: `fz.fetch` waits for values. A handle that you
    pass to another component goes straight from rank to rank. Only the first call of a kind waits.

    - Functions compute new tensors. They write to none that they get. What you pass you may change afterwards.
    - Inputs go to the device of a rank's params. `fz.fetch` gives tensors on the CPU.
    - `torch.autocast` around a call is refused: use `fz.autocast` in `build`.
    - Ranks on several machines connect by TCP, on ports that the system chooses: a firewall between them must let these
      through.
    - With `in_specs` and `out_specs` tensors lie over any axes of a mesh, as in JAX's `shard_map`: the function gets
      its pieces and returns its pieces. A scalar is averaged by how much of the cut tensors each rank has.

    Args:
        build: `build(rank) -> (step, params)`, called on each rank in a process group of its own. A third value may be
            `fz.parallel.axis(mesh, name)`, the only axis that batches are split over, or a DeviceMesh with the axes of
            specs. Under `"processes"`, define it at the top of a module that can be imported.
        ranks: their number.
        on: `"threads"` of this process, `"processes"` on this machine, or `"ray"`, one actor for each rank.
        name: for errors. None takes that of `build`.
        timeout: seconds that the start, one call or one collective may take.
        checked: True: ranks compare what they communicate first (`fz.testing.checked_collectives`). Then a rank that
            fails alone costs the call. Otherwise the component ends, if others communicate without it in that call.
        options: under `"processes"` and `"ray"`, `"backend"` of the process group: `"gloo"` by default; with `"nccl"`
            each rank needs a GPU of its own, which `build` chooses (`torch.cuda.set_device`) or Ray does. Under `"ray"`
            also `"resources"` of each rank, `{"CPU": 1}` by default; `"strategy"` of the placement group, `"PACK"` by
            default; and `"runtime_env"`.
        in_specs: how inputs lie over the ranks: a tuple with a spec for each input, or one spec for all. A spec is a
            `fz.PartitionSpec`, a pytree of them like the input, or None: whole on every rank. Give both arguments or
            neither. With neither, tensors are split along dim 0.
        out_specs: the same for what the function returns, aux included. What is whole must be equal on all ranks.

    Returns:
        A component. Close it with `close()`, or use it in a `with`. `component.spans()` says when the first rank ran
        which call.

    Raises:
        ValueError: a spec names an axis that the mesh has not, or over which the step neither averages nor cuts leaves.
        ImportError: `on="ray"`, and Ray is not installed.
        ComponentDied: from any later use, once a rank has ended.
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
    """Waits for handles of remote components, and returns their values.

    Args:
        tree: any pytree.

    Returns:
        The same tree with plain tensors on the CPU in place of handles. States and grads are waited for, and stay where
        they are.

    Raises:
        ComponentDied: the component of a handle is lost.
        Exception: what the call raised that was to make a value.

    Example:
        >>> fz.fetch({"loss": torch.ones(2), "n": 3})
        {'loss': tensor([1., 1.]), 'n': 3}
    """
    return component.fetch(tree)
