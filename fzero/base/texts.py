"""The words of torch where it refuses something: nothing else tells why."""

from __future__ import annotations

import torch

SAVED_HOOKS = "saved tensor hooks"  # torch.utils.checkpoint under functorch
UNDER_HOOKS = "don't yet support saved tensor hooks"  # torch.func's transforms, where there are any
OLD_FUNCTION = "setup_context"  # an autograd.Function without one under functorch
REQUIRES_GRAD = "requires_grad_()"  # called under functorch
BACKWARD = "backward() called inside a functorch transform"
NO_LEAF = "you can only change requires_grad flags of leaf variables"
NO_COPY = "support the deepcopy protocol"
NO_MEMORY = "doesn't have storage"  # an operator that reads its tensors' memory under functorch
NO_STORAGE = "Cannot access storage of TensorWrapper"
NO_NUMPY = ".numpy() is not supported for tensor subclasses"  # of a fake tensor
NO_STRIDES = "tensors do not have strides"  # compressed sparse ones (CSR, CSC, BSR, BSC) under functorch
IN_INFERENCE = "Cannot set version_counter for inference tensor"  # of what inference mode makes under functorch
FAKE_DEVICES = ("found at least two devices", "found two different devices")  # of fake tensors; the second until 2.11
SETS_DATA = "mutating directly with `.data` inside functorch"
RETAIN_GRAD = "retain_grad() inside of a function being transformed"
NOT_USED = "appears to not have been used in the graph"
FREED = ("data is not allocated yet", "out of bounds for storage of size 0")  # of a tensor whose storage was emptied
NO_STATISTICS = "is not differentiable with respect to argument 'running_"  # of native_batch_norm
NO_SPARSE = "is not implemented for sparse tensors"
HIGHER_ORDER = "higher order operator"  # as torch.cond, in Python's run or below functorch
OF_ENDED = "level <= current_level INTERNAL ASSERT"  # a tensor of a transform of torch.func that has ended
NO_MAP = "Batching rule not implemented"  # of what a map goes through
NESTED_FORWARD = "Nested forward mode AD is not supported"  # torch.func.jvp under torch.autograd.forward_ad
WRITES_LEAF = "leaf Variable that requires grad"
WRITES_CAPTURED = "would mutate a captured Tensor"
WRITES_SAVED = "modified by an inplace operation"
# what functorch refuses, and plain autograd does
REFUSED = (
    *(SAVED_HOOKS, OLD_FUNCTION, REQUIRES_GRAD, NO_LEAF, BACKWARD),
    *(NO_MEMORY, NO_STORAGE, NO_STRIDES, NO_COPY, SETS_DATA, HIGHER_ORDER, IN_INFERENCE),
)
COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)  # of which it says NO_STRIDES


def says(error: BaseException, *texts: str) -> bool:
    """True if torch refused something for one of these reasons."""
    return any(text in _words(error) for text in texts)


def _words(error: BaseException) -> str:
    """What torch says; of an operator that has no rule for a functorch level it says no more than which level."""
    if isinstance(error, KeyError) and [type(x).__name__ for x in error.args] == ["TransformType"]:
        return HIGHER_ORDER
    return str(error) if isinstance(error, RuntimeError) else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether an error is an allocator's: on CPU torch raises a plain RuntimeError."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error)
