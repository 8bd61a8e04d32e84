"""fake_mesh: a mesh of any number of ranks, of which there is one, to which nothing is sent."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping

from fzero.base.arguments import need_int, need_str, wrong
from fzero.comm import backend
from fzero.comm.backend import Mesh
from fzero.testing._ranks import hooks_kept


@contextlib.contextmanager
def fake_mesh(axes: Mapping[str, int], rank: int = 0) -> Iterator[Mesh]:
    """A context with a mesh of any number of ranks in one process. Shapes are right; values and messages are not.

    It runs on torch's fake process group. Use it for `fz.plan`, `fz.parallel.check` and shapes.

    Args:
        axes: name -> number of ranks, the slowest axis first. Thousands of ranks are fine.
        rank: the rank that runs, among all of them.

    Raises:
        RuntimeError: there is a process group already.

    Example:
        >>> with fz.testing.fake_mesh({"dp": 64, "tp": 8}, rank=9) as mesh:
        ...     ax = fz.parallel.axis(mesh, "tp")
        ...     fz.parallel.gather(torch.ones(2), ax, 0).shape, ax.rank
        (torch.Size([16]), 1)
    """
    from torch.testing._internal.distributed import fake_pg  # which makes the backend known

    if not isinstance(axes, Mapping) or not axes:
        raise wrong("testing.fake_mesh", "axes", axes, "a dict of names of axes to numbers of ranks")
    for name, size in axes.items():
        need_str(name, "testing.fake_mesh", "axes", "names of axes for its keys")
        need_int(size, "testing.fake_mesh", f"axes[{name!r}]", "a number of ranks", least=1)
    count = math.prod(axes.values())
    if need_int(rank, "testing.fake_mesh", "rank", "one of the ranks", least=0) >= count:
        raise ValueError(f"testing.fake_mesh: got rank={rank}, expected one of {count} ranks, from 0 to {count - 1}.")
    if backend.initialized():
        raise RuntimeError(
            "testing.fake_mesh: there is a process group already. Use fake_mesh outside of run_ranks and torchrun. "
            "Inside of them use torch.distributed.init_device_mesh."
        )
    dist = backend.dist
    with hooks_kept():
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=rank, world_size=count)
        try:
            yield dist.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        finally:
            dist.destroy_process_group()
