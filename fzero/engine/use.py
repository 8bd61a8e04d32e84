"""Uses of a buffer: the maps from a stored shard to the full buffer in compute dtype, differentiable at any level.

Gathering a shard and reduce-scattering a cotangent are maps of the *mean* inner product over ranks, so that each is the
other's transpose (ZeRO, Rajbhandari et al. 2020, section 5).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from fzero.base import pages, private
from fzero.base.node import direct, first_order
from fzero.comm.axis import Axis
from fzero.comm.linear import Wire, passed
from fzero.engine.masking import kept
from fzero.formats.formats import Blocks, Stored, decode, encode
from fzero.stores.away import Placed
from fzero.table.counting import Mask

_BLOCKS = Blocks()


@dataclass(eq=False, slots=True)
class Use(Wire):
    """One buffer in one run: its dtypes, its axis, and the value at hand where there is one. Opaque to pytrees.

    Attributes:
        shard: this rank's shard as it is stored, wherever that is; where `whole`, the full buffer.
        device: that computes.
        gather8: whether params travel in 8 bits.
        placeholder: whether the differentiated tensor has no memory and is never read: grads are summed in another
            dtype than the shard is stored in, or it is encoded.
        held: the full buffer in compute dtype, where it is at hand (ZeRO-1 and 2).
        whole: whether every rank has the full buffer, in a memory that it is brought from.
        followed: whether a transform around the run goes on through the shard.
        mask: of a run that may add nothing to gradients.
        gathers: whether ranks exchange their shards for each use.
        fetches: whether the stored shard is brought to the device for each use.
        transient: whether the full buffer is made for each use, and need not outlive it.
        mapped: whether its memory is the system's, and goes back to it: see `base.pages.empty`.
    """

    shard: Placed
    device: torch.device
    grad: torch.dtype
    placeholder: bool = False
    gather8: bool = False
    held: torch.Tensor | None = None
    whole: bool = False
    followed: bool = False
    mask: Mask | None = None
    mapped: bool = False
    gathers: bool = field(init=False)
    fetches: bool = field(init=False)
    transient: bool = field(init=False)

    def __post_init__(self) -> None:
        self.gathers = self.held is None and not self.whole and self.axis.size > 1
        self.fetches = self.held is None and self.shard.away
        self.transient = self.gathers or self.fetches

    def value(self) -> torch.Tensor:
        """The full buffer in compute dtype: what is at hand or stored where it is that already, otherwise a new one."""
        if self.held is not None:
            return self.held
        if not (self.transient or self.gather8):
            own = self.shard.parts[0]
            same = self.shard.format.plain and isinstance(own, torch.Tensor) and own.dtype == self.compute
            return own.detach() if same else self.shard.stored().to(self.compute).detach()  # type: ignore[union-attr]
        full = self.empty()
        self.start_into(full)()
        return full

    def empty(self) -> torch.Tensor:
        """Memory for the full buffer in compute dtype."""
        numel = self.shard.numel() * (1 if self.whole else self.axis.size)
        return pages.empty(numel, self.compute, self.device, mapped=self.mapped)

    def start_fetch(self, full: torch.Tensor | None = None) -> Callable[[], Stored]:
        """Begins to bring the stored shard to the device, into its place in `full` where it is used as it is stored."""
        shard = self.shard if self.gather8 else self.shard.of(self.compute)
        straight = shard.format.plain and shard.dtype == self.compute and not self.gather8
        if full is None or not straight:
            return shard.start()
        return shard.start([full.chunk(self.axis.size)[self.axis.rank] if self.gathers else full])

    def start_into(self, full: torch.Tensor, fetched: Callable[[], Stored] | None = None) -> Callable[[], None]:
        """Begins to gather the stored shard into `full`, once it has been fetched."""
        begun = fetched or self.start_fetch(full)
        if self.gathers or (self.gather8 and not self.whole):
            return start_gather(self.axis, full, begun(), self.gather8, self.tag)

        def finish() -> None:
            value = begun().to(full.dtype)
            if not private.same_place(value, full):
                with private.preserve_version([full]), torch.no_grad():
                    full.copy_(value)

        return finish

    def apply(self, primal: torch.Tensor) -> torch.Tensor:
        """The full buffer as a differentiable function of the shard."""
        alone = self.held is None and not self.placeholder and not self.gather8 and self.axis.ranks == 1
        if alone and self.compute == self.grad == self.reduce == self.shard.dtype:
            full = primal
        elif self.followed:
            full = primal.to(self.compute) if self.axis.ranks == 1 else self.spread(primal)
        else:
            full = _value(self, primal)
        return full if self.mask is None else passed(functools.partial(kept, self.mask), full)

    def collect(self, full: torch.Tensor) -> torch.Tensor:
        return Wire.collect(self, full if self.mask is None else kept(self.mask, full))


def start_gather(axis: Axis, full: torch.Tensor, shard: Stored, in_8_bits: bool, tag: Hashable) -> Callable[[], None]:
    """Begins to fill a full buffer with all ranks' shards, which may travel in 8 bits."""
    if not in_8_bits:
        return axis.start_gather(full, shard.to(full.dtype), tag)
    codes, scales = encode(_BLOCKS, shard.to(shard.dtype))
    sent = torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)])
    received = sent.new_empty(sent.numel() * axis.size)
    wait = axis.start_gather(received, sent, tag)

    def finish() -> None:
        wait()
        cut = codes.numel()
        with private.preserve_version([full]), torch.no_grad():
            for target, wire in zip(full.chunk(axis.size), received.chunk(axis.size), strict=True):
                target.copy_(decode(_BLOCKS, (wire[:cut].view(torch.int8), wire[cut:].view(torch.int16)), full.dtype))

    return finish


class _Value(torch.autograd.Function):
    """The buffer in use: its value may be at hand, its derivative is that of spreading the shard."""

    @staticmethod
    def forward(use: Use, primal: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        full = use.value()
        return full.view(full.shape)

    @staticmethod
    def setup_context(ctx: private.Context, inputs: tuple[Use, torch.Tensor], output: object) -> None:
        ctx.use = inputs[0]

    @staticmethod
    def backward(ctx: private.Context, cotangent: torch.Tensor) -> object:  # type: ignore[override]
        return None, ctx.use.reduce_scatter(cotangent) if first_order() else ctx.use.collect(cotangent)

    @staticmethod
    def jvp(ctx: private.Context, _: object, tangent: torch.Tensor) -> object:  # type: ignore[override]
        return ctx.use.spread(tangent)

    @staticmethod
    def vmap(info: object, in_dims: Sequence[int], use: Use, primal: torch.Tensor) -> object:  # type: ignore[override]
        return use.spread(primal.movedim(in_dims[1], -1).contiguous()), -1


_value = direct(_Value)
