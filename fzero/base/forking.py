"""How processes of our own begin."""

from __future__ import annotations

import multiprocessing
import multiprocessing.context

Context = multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext


def forking_context(module: str) -> Context:
    """Processes that are forked from one that does nothing but have imported a module, which takes seconds, once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module, "torch._dynamo"])  # torch.func's first pullback would import it in each
    return context
