"""The inventories by which pages link to torch's and Python's documentation: `python docs/inventories/update.py`.

The build reads the files beside this script and never asks the network. Python's inventory is downloaded. Torch's is
written from the names below: each has a page of its own, `generated/<name>.html`, at an address that does not change.
"""

from __future__ import annotations

import pathlib
import sys
import urllib.request
import zlib

HERE = pathlib.Path(__file__).parent
PYTHON = "https://docs.python.org/3/objects.inv"
CLASSES = """
    torch.nn.Module torch.nn.ModuleList torch.nn.BatchNorm2d torch.nn.SyncBatchNorm torch.nn.MultiheadAttention
    torch.optim.SGD torch.optim.Adam torch.optim.AdamW torch.optim.Adafactor torch.optim.Muon torch.optim.Optimizer
""".split()
FUNCTIONS = """
    torch.func.vjp torch.func.jvp torch.func.grad torch.func.grad_and_value torch.func.jacrev torch.func.jacfwd
    torch.func.hessian torch.func.vmap torch.func.functional_call torch.func.stack_module_state torch.vmap torch.cond
    torch.compile torch.manual_seed torch.tensor_split torch.autograd.grad torch.autograd.backward
    torch.nn.functional.scaled_dot_product_attention torch.nn.functional.cross_entropy torch.nn.functional.pad
    torch.nn.utils.clip_grad_norm_
""".split()


def torchs() -> bytes:
    """Torch's inventory, in the second version of Sphinx's format."""
    lines = [
        f"{name} py:{role} 1 generated/{name}.html#{name} -"
        for role, names in (("class", CLASSES), ("function", FUNCTIONS))
        for name in names
    ]
    head = (
        "# Sphinx inventory version 2\n# Project: PyTorch\n# Version: stable\n"
        "# The remainder of this file is compressed using zlib.\n"
    )
    return head.encode() + zlib.compress("\n".join([*lines, ""]).encode(), 9)


if __name__ == "__main__":
    (HERE / "torch.inv").write_bytes(torchs())
    if "--torch" not in sys.argv:
        with urllib.request.urlopen(PYTHON, timeout=60) as response:
            (HERE / "python.inv").write_bytes(response.read())
