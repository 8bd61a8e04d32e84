"""Small models as people write them, one of each kind, in float64: what their forwards do, not what they learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

ROWS = 4  # examples of each rank
F64 = torch.float64
Batch = tuple[torch.Tensor, ...]


class Drawn(nn.Module):
    """Draws a mask for each example, and notes it in a buffer; one that is given is taken in its place."""

    def __init__(self, p: float, how: str) -> None:
        super().__init__()
        self.p, self.how, self.given = p, how, False
        self.register_buffer("mask", torch.ones(ROWS))
        self.mask: torch.Tensor

    def drawn(self, x: torch.Tensor) -> torch.Tensor:
        keep = 1 - self.p
        if self.how == "torchvision":
            noise = torch.empty([ROWS], dtype=x.dtype, device=x.device)
            return noise.bernoulli_(keep).div_(keep)
        if self.how == "timm":
            return x.new_empty((ROWS,)).bernoulli_(keep).div_(keep)
        return F.dropout(torch.ones(ROWS, dtype=x.dtype), self.p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.given:
            self.mask.copy_(self.drawn(x))
        return x * self.mask.clone().view(-1, *[1] * (x.ndim - 1))


# ---- images


class BasicBlock(nn.Module):
    """As torchvision's ResNet has it: a relu in place, and a sum in place."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.downsample = None
        if stride > 1 or inner != outer:
            self.downsample = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.layers = nn.ModuleList([BasicBlock(3, 3, 1), BasicBlock(3, 4, 2), BasicBlock(4, 4, 1)])
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(self.stem(x), 3, 1, 1)
        for layer in self.layers:
            x = layer(x)
        return self.fc(torch.flatten(self.pool(x), 1))


# ---- sequences


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> PackedSequence:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.lstm(packed)[0]


class Unpacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 3, batch_first=True)

    def forward(self, packed: PackedSequence, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        padded, _ = pad_packed_sequence(packed, batch_first=True)
        return self.gru(padded, hidden)


class Recurrent(nn.Module):
    """Layers that pass packed sequences on, and hidden states of other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Packs(), nn.LSTM(8, 4, proj_size=3), Unpacks()])
        self.cell, self.head = nn.LSTMCell(3, 3), nn.Linear(3, 2)
        self.lstm = nn.LSTM(3, 3, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packs, packed, unpacks = self.layers
        sequences, (hidden, _) = packed(packs(x, lengths))
        out, last = unpacks(sequences, hidden)
        out, _ = self.lstm(out)
        state = (last[0], torch.zeros_like(last[0]))
        for step in out.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


class Classifier(nn.Module):
    """Packs outside of its layers, so that it is one unit as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


# ---- diffusion


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, time: int, how: str = "dropout") -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.time, self.dropped = nn.Linear(time, 2 * outer), Drawn(0.3, how)
        self.norm2, self.conv2 = nn.GroupNorm(2, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.skip = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, 1)
        h = self.norm2(h) * (1 + scale) + shift
        return self.skip(x) + self.conv2(self.dropped(F.silu(h)))


class Attention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.GroupNorm(2, dim), nn.Conv1d(dim, 3 * dim, 1), nn.Conv1d(dim, dim, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(2)
        q, k, v = (y.unflatten(1, (2, -1)).transpose(-1, -2) for y in self.qkv(flat).chunk(3, 1))
        out = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).flatten(1, 2)
        return x + self.out(out).view_as(x)


class Down(nn.Module):
    """Returns what it has computed in a list, too, for the way up."""

    def __init__(self, inner: int, outer: int, last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(inner, outer, 6)])
        self.down = None if last else nn.Conv2d(outer, outer, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        skips: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, time)
            skips.append(x)
        return x if self.down is None else self.down(x), skips


class Up(nn.Module):
    """Is given those of the same size."""

    def __init__(self, inner: int, outer: int, attends: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(2 * inner, outer, 6, "torchvision")])
        self.attention = Attention(outer) if attends else None

    def forward(self, x: torch.Tensor, time: torch.Tensor, skips: list[torch.Tensor]) -> torch.Tensor:
        for block, skip in zip(self.blocks, reversed(skips), strict=True):
            if skip.shape[-1] != x.shape[-1]:
                x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, skip], 1), time)
        return x if self.attention is None else self.attention(x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, 6), nn.SiLU(), nn.Linear(6, 6))
        self.first, self.last = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.downs = nn.ModuleList([Down(2, 2, False), Down(2, 4, True)])
        self.middle = Residual(4, 4, 6, "timm")
        self.ups = nn.ModuleList([Up(4, 2, True), Up(2, 2, False)])

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        rates = torch.exp(-torch.arange(2, dtype=x.dtype))
        angles = times[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        x, kept = self.first(x), list[list[torch.Tensor]]()
        for down in self.downs:
            x, skips = down(x, time)
            kept.append(skips)
        x = self.middle(x, time)
        for up in self.ups:
            x = up(x, time, kept.pop())
        return self.last(x)


# ---- fixed points


class FixedPoint(torch.autograd.Function):
    """z = f(z, *operands), whose cotangent solves the transposed equation (Bai et al., arXiv 1909.01377)."""

    @staticmethod
    def forward(f: Callable[..., torch.Tensor], z: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        for _ in range(12):
            z = f(z, *operands)
        return z

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.f, _, *operands = inputs
        ctx.save_for_backward(output, *operands)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        z, *operands = ctx.saved_tensors
        _, pull = torch.func.vjp(ctx.f, z, *operands)  # type: ignore[misc]
        adjoint = cotangent
        for _ in range(12):
            adjoint = cotangent + pull(adjoint)[0]
        return None, None, *pull(adjoint)[1:]


def _contraction(z: torch.Tensor, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tanh(0.4 * z @ w.t() + x + b)


class Implicit(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return FixedPoint.apply(_contraction, torch.zeros_like(x), x, self.inner.weight, self.inner.bias)  # type: ignore[no-any-return]


class Hooked(nn.Module):
    """The same by one more application of f, and a hook on what it gives."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def f(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(0.4 * self.inner(z) + x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(12):
                z = self.f(z, x)
        z = self.f(z, x)
        z0 = z.clone().detach().requires_grad_()
        f0 = self.f(z0, x)

        def hook(cotangent: torch.Tensor) -> torch.Tensor:
            adjoint = cotangent
            for _ in range(12):
                adjoint = torch.autograd.grad(f0, z0, adjoint, retain_graph=True)[0] + cotangent
            return adjoint

        if z.requires_grad:
            z.register_hook(hook)
        return z


class Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Implicit(4), Hooked(4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- all of them


class Kind(NamedTuple):
    """A model, and what a rank's batch of it is made of: shapes of floats, or functions of a generator."""

    make: Callable[[], nn.Module]
    inputs: tuple[Any, ...]


def _lengths(generator: torch.Generator) -> torch.Tensor:
    return torch.tensor([5, 2, 4, 3])[torch.randperm(ROWS, generator=generator)]


KINDS: dict[str, Kind] = {
    "resnet": Kind(ResNet, ((2, 6, 6),)),
    "recurrent": Kind(Recurrent, ((5, 3), _lengths)),
    "classifier": Kind(Classifier, ((5, 3), _lengths)),
    "unet": Kind(UNet, ((2, 4, 4), ())),
    "equilibrium": Kind(Equilibrium, ((4,),)),
}


def made(kind: str) -> nn.Module:
    """The same model at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(len(kind))
        module = KINDS[kind].make().double()
        for p in module.parameters():
            if p.ndim == 1:
                nn.init.normal_(p, 0.5, 0.5)
    return module


def batches(kind: str, rank: int, count: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield tuple([_input(each, generator) for each in KINDS[kind].inputs])


def _input(shape: Any, generator: torch.Generator) -> torch.Tensor:
    if callable(shape):
        return shape(generator)  # type: ignore[no-any-return]
    return torch.randn(ROWS, *shape, generator=generator, dtype=F64)


def replay(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    """Has a module take the masks that another one has drawn."""
    for path, own in module.named_modules():
        if isinstance(own, Drawn):
            own.given = True
            own.mask.copy_(buffers[f"{path}.mask"])
