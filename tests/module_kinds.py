"""Small models as people write them, one of each kind, in float64: what their forwards do, not what they learn."""

from __future__ import annotations

import math
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


# ---- graphs


class Attends(nn.Module):
    """Messages along edges, weighted by a softmax over those that arrive at a node."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.message, self.score, self.update = nn.Linear(2 * dim, dim), nn.Linear(dim, 1), nn.GRUCell(dim, dim)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        messages = torch.tanh(self.message(torch.cat([nodes[source], nodes[target]], -1)))
        score = self.score(messages).squeeze(-1)
        top = score.new_full((len(nodes),), -math.inf).scatter_reduce(0, target, score.detach(), "amax")
        weight = (score - top[target]).exp()
        total = torch.zeros(len(nodes), dtype=score.dtype).scatter_add(0, target, weight)
        summed = torch.zeros_like(nodes).index_add_(0, target, messages * (weight / total[target])[:, None])
        return self.update(summed, nodes)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(8, 2)
        self.layers = nn.ModuleList([Attends(4) for _ in range(2)])

    def forward(self, kinds: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        x = self.embed(kinds)
        for layer in self.layers:
            x = layer(x, edges)
        mean = torch.zeros(ROWS, 4, dtype=x.dtype).scatter_reduce(0, graph[:, None].expand(-1, 4), x, "mean")
        sums = x.new_zeros(ROWS, 4)
        sums.index_add_(0, graph, x)
        return self.head(torch.cat([mean, sums], -1))


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


class Functional(nn.Module):
    """By Newton's steps, whose Jacobians are torch.func's, and the implicit function theorem by one more of them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def gap(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(0.4 * self.inner(z) + x) - z

        def newton(z: torch.Tensor) -> torch.Tensor:
            jacobians = torch.func.vmap(torch.func.jacrev(gap))(z, x)
            return z - torch.linalg.solve(jacobians.detach(), gap(z, x))

        z = torch.zeros_like(x)
        for _ in range(3):
            z = newton(z).detach()
        return newton(z)


class Equilibrium(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Implicit(4), Hooked(4), Functional(4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# ---- state


class Critic(nn.Module):
    """Spectral norms, new and old, and other parametrisations."""

    def __init__(self) -> None:
        super().__init__()
        from torch.nn.utils import parametrizations as p

        self.blocks = nn.ModuleList(
            [
                p.spectral_norm(nn.Conv1d(2, 4, 3, padding=1), n_power_iterations=2),
                nn.utils.spectral_norm(nn.Conv1d(4, 4, 1)),
                p.weight_norm(nn.Conv1d(4, 4, 1)),
                p.orthogonal(nn.Linear(6, 6)),
            ]
        )
        self.head = nn.utils.spectral_norm(nn.Linear(24, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.leaky_relu(block(x), 0.2)
        return self.head(x.flatten(1))


class Quantiser(nn.Module):
    """A codebook that follows what it codes by moving averages, and passes gradients straight through."""

    def __init__(self, dim: int, codes: int) -> None:
        super().__init__()
        self.decay = 0.9
        codebook = torch.randn(dim, codes)
        self.register_buffer("embed", codebook)
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", codebook.clone())
        self.embed: torch.Tensor
        self.cluster_size: torch.Tensor
        self.embed_avg: torch.Tensor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        distance = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        codes = (-distance).max(1).indices
        hot = F.one_hot(codes, self.embed.shape[1]).type(flat.dtype)
        quantised = F.embedding(codes.view(x.shape[:-1]), self.embed.transpose(0, 1))
        if self.training:
            counts, sums = hot.sum(0), flat.transpose(0, 1) @ hot
            with torch.no_grad():
                self.cluster_size.mul_(self.decay).add_(counts, alpha=1 - self.decay)
                self.embed_avg.mul_(self.decay).add_(sums, alpha=1 - self.decay)
                self.embed.copy_(self.embed_avg / (self.cluster_size + 1e-5))
        commitment = (quantised.detach() - x).pow(2).mean()
        return x + (quantised - x).detach(), commitment


class Observer(nn.Module):
    """Fake quantisation over a range that it has seen, counted (Jacob et al., arXiv 1712.05877)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.low: torch.Tensor
        self.high: torch.Tensor
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = torch.aminmax(x.detach())
        first = self.calls == 0
        self.low = torch.where(first, low, 0.9 * self.low + 0.1 * low)
        self.high.copy_(torch.where(first, high, 0.9 * self.high + 0.1 * high))
        self.calls += 1
        scale = (self.high - self.low) / 15
        inside = ((x >= self.low) & (x <= self.high)).to(x.dtype)
        rounded = torch.round(x / scale).clamp(torch.round(self.low / scale), torch.round(self.high / scale)) * scale
        return x * inside + (rounded - x * inside).detach()


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), Observer(), nn.Tanh()) for _ in range(2)])
        self.quantisers = nn.ModuleList([Quantiser(4, 5), Quantiser(4, 5)])
        self.decoder = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.encoder:
            x = layer(x)
        total = torch.zeros((), dtype=x.dtype)
        for quantiser in self.quantisers:
            x, commitment = quantiser(x)
            total = total + commitment
        return self.decoder(x) + total


# ---- all of them


class Kind(NamedTuple):
    """A model, and what a rank's batch of it is made of: shapes of floats, or functions of a generator."""

    make: Callable[[], nn.Module]
    inputs: tuple[Any, ...]


def _integers(most: int, *shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randint(most, shape, generator=generator)


def _lengths(generator: torch.Generator) -> torch.Tensor:
    return torch.tensor([5, 2, 4, 3])[torch.randperm(ROWS, generator=generator)]


def _graphs(generator: torch.Generator) -> torch.Tensor:
    return torch.arange(12) % ROWS


KINDS: dict[str, Kind] = {
    "resnet": Kind(ResNet, ((2, 6, 6),)),
    "recurrent": Kind(Recurrent, ((5, 3), _lengths)),
    "classifier": Kind(Classifier, ((5, 3), _lengths)),
    "graph": Kind(Graph, (_integers(5, 12), _integers(12, 2, 30), _graphs)),
    "unet": Kind(UNet, ((2, 4, 4), ())),
    "equilibrium": Kind(Equilibrium, ((4,),)),
    "critic": Kind(Critic, ((2, 6),)),
    "quantised": Kind(Quantised, ((3, 4),)),
}


def made(kind: str) -> nn.Module:
    """The same model at every call."""
    with torch.random.fork_rng():
        torch.manual_seed(len(kind))
        module = KINDS[kind].make().double()
        for name, p in module.named_parameters():
            if p.ndim == 1 and "parametrizations" not in name:
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
