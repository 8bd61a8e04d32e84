"""How processes of our own begin."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import multiprocessing.context
import os
import pickle
import sys
from collections.abc import Callable, Iterator

Context = multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext


def forking_context(module: str) -> Context:
    """Processes that are forked from one that does nothing but have imported a module, which takes seconds, once."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module, "torch._dynamo"])  # torch.func's first pullback would import it in each
    return context


@contextlib.contextmanager
def startable() -> Iterator[None]:
    """Inside, a process can begin though this program is no file: one on stdin is not read again."""
    own = vars(sys.modules["__main__"])
    path = own.get("__file__")
    if path is None or os.path.exists(path):
        yield
        return
    del own["__file__"]
    try:
        yield
    finally:
        own["__file__"] = path


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        found = super().find_class(module, name)
        if module == "__main__" and getattr(found, "__module__", module) not in (module, "__mp_main__"):
            raise AttributeError(f"{name!r} of the program is not here")  # what starts processes has a main of its own
        return found


def pickled(fn: Callable[[int], object], who: str) -> bytes:
    """A function for `loaded` in another process."""
    try:
        return pickle.dumps(fn)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"{who}: {fn!r} cannot be pickled ({error}). Define it at the top of a module, or use functools.partial of "
            "such a function."
        ) from error


def loaded(job: bytes, who: str, on_threads: str) -> Callable[[int], object]:
    """A function that another process has pickled by its name."""
    try:
        return _Unpickler(io.BytesIO(job)).load()
    except (AttributeError, ImportError) as error:
        raise TypeError(
            f"{who}: the process of a rank cannot find the function, or what it is made of ({error}). What a notebook, "
            "a program on stdin or a block under `if __name__ == '__main__'` defines is in no other process. Put it "
            f"into a .py file and import it from there, or take ranks that are threads: {on_threads}."
        ) from error
