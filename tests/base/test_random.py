"""Random numbers of a unit: the same on the main thread, on others and on processes, and nobody else's disturbed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from nightly import in_turns
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fzero as fz
from fzero.base.private import inductor
from fzero.base.random import seeded
from fzero.testing import run_ranks

X = torch.linspace(0.1, 0.9, 60).reshape(6, 10)


def on_thread(fn: Callable[[], Any]) -> Any:
    """The result of `fn()` on a thread of its own, or its exception."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append((fn(), None))
        except BaseException as error:
            box.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = box[0]
    if error is not None:
        raise error
    return result


def drawn(fn: Callable[[], Any], seed: int = 5) -> Any:
    with seeded(seed):
        return fn()


# ---- steps


def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.tanh(x @ p["w"]), 0.3) + 0.1 * torch.randn_like(x)


UNIT = fz.unit(block)


def loss_fn(params: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = F.dropout(x, 0.2)  # outside of any unit
    for p in params["blocks"]:
        x = UNIT(p, x)
    return (x**2).mean(), F.dropout(torch.ones(16), 0.5)  # goes on with the stream that the units left


def trained(
    rank: int, remat: bool = False, stage: int = 3, compiles: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor, bool]:
    """Params, masks, and whether the default generator is where it was."""
    before = torch.get_rng_state()
    step = fz.train_step(loss_fn, fz.sgd(0.1), has_aux=True)
    step = fz.shard_zero3(step) if stage else step
    step = fz.remat(step) if remat else step
    step = fz.compile(step) if compiles else step
    state = step.init({"blocks": [{"w": torch.eye(10) / (i + 1)} for i in range(3)]})
    masks = []
    for _ in range(3):
        state, metrics = step(state, X + rank)
        masks.append(metrics["aux"])
    leaves = [p["w"] for p in fz.gather(state.params)["blocks"]]
    return leaves, torch.stack(masks), torch.equal(before, torch.get_rng_state())


@in_turns(2)
@pytest.mark.parametrize("remat", [False, True])
def test_dropout_is_the_same_on_threads_and_on_processes(remat: bool) -> None:
    fn = functools.partial(trained, remat=remat)
    threads = run_ranks(fn, 3, backend="threads")
    processes = run_ranks(fn, 3, backend="processes")
    for (params, masks, untouched), (other, other_masks, other_untouched) in zip(threads, processes, strict=True):
        assert untouched and other_untouched
        assert torch.equal(masks, other_masks)
        assert all(torch.equal(p, q) for p, q in zip(params, other, strict=True))
    assert not torch.equal(threads[0][1], threads[1][1])


@in_turns(12, "compiled by torch")
@pytest.mark.parametrize(
    "compiles",
    [
        False,
        pytest.param(True, marks=pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")),
    ],
)
def test_a_thread_draws_what_the_main_thread_draws(compiles: bool) -> None:
    fn = functools.partial(trained, 0, stage=0, compiles=compiles)
    (params, masks, _), (other, other_masks, untouched) = fn(), on_thread(fn)
    assert untouched and torch.equal(masks, other_masks)
    assert all(torch.equal(p, q) for p, q in zip(params, other, strict=True))


def test_main_and_three_threads_draw_at_once() -> None:
    def work(seed: int, rounds: int) -> list[torch.Tensor]:
        out = []
        for i in range(rounds):
            with seeded(seed * 1000 + i):
                parts = [torch.rand(7), F.dropout(X), torch.randn_like(X), torch.native_dropout(X, 0.5, True)[0]]
                with seeded(i):
                    parts.append(torch.bernoulli(X))
                parts.append(torch.randperm(9).float())
            out.append(torch.cat([part.flatten() for part in parts]))
        return out

    alone = [work(seed, 150) for seed in range(4)]
    before = torch.get_rng_state()
    together: list[Any] = [None] * 4

    def put(seed: int) -> None:
        together[seed] = [work(seed, 150) for _ in range(4)]

    threads = [threading.Thread(target=put, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    put(0)
    for thread in threads:
        thread.join()
    assert torch.equal(before, torch.get_rng_state())
    for want, found in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for run in found for a, b in zip(want, run, strict=True))


def test_what_a_thread_draws_outside_of_units_is_its_own_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    started, finish = threading.Event(), threading.Event()

    def other() -> torch.Tensor:
        with seeded(3):
            started.set()
            finish.wait()
            return torch.rand(4)

    box: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: box.append(other()))
    torch.manual_seed(0)
    thread.start()
    started.wait()
    mine = torch.rand(4)
    finish.set()
    thread.join()
    assert torch.equal(mine, torch.rand(4, generator=generator))
    assert torch.equal(box[0], drawn(lambda: torch.rand(4), 3))


# ---- operators


def _lstm() -> torch.Tensor:
    module = torch.nn.LSTM(4, 4, 2, dropout=0.5)
    return module(torch.ones(3, 2, 4))[0].detach()


def _in_inference_mode() -> torch.Tensor:
    with torch.inference_mode():
        return F.dropout(X).clone()


def _under_a_mode() -> torch.Tensor:
    with FlopCounterMode(display=False):
        return F.dropout(X) + torch.rand_like(X) + torch.native_dropout(X, 0.5, True)[0]


def _in_inference_mode_under_a_mode() -> torch.Tensor:
    with torch.inference_mode(), FlopCounterMode(display=False):
        return F.dropout(X).clone()


def _by_distributions() -> torch.Tensor:
    d = torch.distributions
    made = [d.Gamma(X, X), d.Dirichlet(X), d.Beta(X, X), d.Poisson(X), d.Binomial(5, X), d.Normal(0, X), d.Cauchy(0, X)]
    return torch.stack([distribution.sample() for distribution in made])


def _in_a_function() -> torch.Tensor:
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return F.dropout(x) * torch.rand_like(x)

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return g * torch.randn_like(g)

    x = X.clone().requires_grad_()
    return torch.autograd.grad(Noise.apply(x).sum(), x)[0]  # type: ignore[union-attr]


def _likes(x: torch.Tensor) -> torch.Tensor:
    return torch.randn_like(x) + torch.rand_like(X[0]) + torch.randint_like(x, 1000) + torch.randint_like(x, 3, 1000)


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "dropout": lambda: F.dropout(X),
    "dropout in place": lambda: F.dropout(X.clone(), inplace=True),
    "native_dropout": lambda: torch.native_dropout(X, 0.3, True)[0],
    "other dropouts": lambda: F.alpha_dropout(X, training=True) + F.feature_alpha_dropout(X, training=True),
    "factories": lambda: torch.rand(3) + torch.randn(3) + torch.randint(9, (3,)) + torch.randperm(3),
    "the default generator by name": lambda: torch.rand(3, generator=torch.default_generator),
    "like": lambda: torch.rand_like(X) + torch.randn_like(X) + torch.randint_like(X, 9) + torch.randint_like(X, 3, 9),
    "out": lambda: torch.normal(X, X, out=torch.empty(0)) + torch.rand(6, 10, out=torch.empty(0)),
    "in place": lambda: X.clone().normal_() + X.clone().uniform_() + X.clone().random_() + X.clone().exponential_(),
    "choices": lambda: torch.multinomial(X, 4).float() + torch.bernoulli(X)[:, :4] + torch.poisson(X)[:, :4],
    "activations": lambda: F.rrelu(-X, training=True) + F.gumbel_softmax(X),
    "attention": lambda: F.scaled_dot_product_attention(*X.expand(3, 2, 2, 6, 10), dropout_p=0.4),
    "lstm": _lstm,
    "distributions": _by_distributions,
    "an autograd function": _in_a_function,
    "inference mode": _in_inference_mode,
    "a dispatch mode": _under_a_mode,
    "a dispatch mode in inference mode": _in_inference_mode_under_a_mode,
    "vjp": lambda: torch.func.vjp(lambda x: F.dropout(x * x), X)[1](X)[0],
    "jvp": lambda: torch.func.jvp(lambda x: F.dropout(x * x) * torch.rand_like(x), (X,), (X,))[1],
    "vmap, different": lambda: torch.func.vmap(lambda x: F.dropout(x) + torch.rand(10), randomness="different")(X),
    "vmap, same": lambda: torch.func.vmap(lambda x: F.dropout(x) + torch.rand(10), randomness="same")(X),
    "vmap of likes, different": lambda: torch.func.vmap(_likes, randomness="different")(X),
    "vmap of likes, same": lambda: torch.func.vmap(_likes, randomness="same")(X),
    "vmap of native_dropout": lambda: torch.func.vmap(
        lambda x: torch.native_dropout(x, 0.5, True)[0], randomness="different"
    )(X),
    "hessian": lambda: torch.func.jacfwd(torch.func.grad(lambda x: (F.dropout(x) ** 3).sum()), randomness="same")(X[0]),
}


@pytest.mark.parametrize("name", DRAWS)
def test_every_operator_draws_the_same_on_a_thread(name: str) -> None:
    fn, before = DRAWS[name], torch.get_rng_state()

    def work() -> tuple[torch.Tensor, bool]:
        with seeded(5):
            return fn(), torch.equal(before, torch.get_rng_state())

    (here, _), (there, untouched) = work(), on_thread(work)
    assert torch.equal(here, there) and untouched


def test_no_operator_that_takes_a_generator_is_forgotten() -> None:
    """Each is given its own in a region of a thread, by itself or by the overload that takes one."""
    from fzero.base.random import _NAME

    on_thread(lambda: drawn(lambda: None))
    internal: Any = torch._C
    kernel_of, count = internal._dispatch_has_kernel_for_dispatch_key, 0
    for schema in internal._jit_get_all_schemas():
        arguments = [argument.name for argument in schema.arguments]
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        if not name.startswith("aten::") or "generator" not in arguments or not internal._dispatch_has_kernel(name):
            continue
        calls_others = "names" in arguments or kernel_of(name, "CompositeImplicitAutograd")
        assert calls_others or kernel_of(name, _NAME), name
        count += 1
    assert count > 50


def test_a_generator_of_the_users_own_stays_in_use() -> None:
    generator = torch.Generator().manual_seed(1)
    found = on_thread(lambda: drawn(lambda: torch.rand(3, generator=generator) + torch.rand(3)))
    again = torch.Generator().manual_seed(1)
    assert torch.equal(found, torch.rand(3, generator=again) + drawn(lambda: torch.rand(3)))


@in_turns(12, "compiled by torch")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_compiled_code_draws_the_same_on_a_thread() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (F.dropout(x * 2) + torch.rand_like(x) * x + F.dropout(x, 0.2)).sin()

    want = drawn(lambda: fn(X))
    code = torch.compile(fn, backend=inductor)
    before = torch.get_rng_state()
    # the first call, which also compiles, and later ones; then the main thread, with code of its own
    found = [*on_thread(lambda: [drawn(lambda: code(X)) for _ in range(3)]), drawn(lambda: code(X))]
    for out in found:
        torch.testing.assert_close(out, want)
    assert torch.equal(before, torch.get_rng_state())


def test_fakes_draw_nothing_on_a_thread() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def work() -> torch.Tensor:
        with seeded(5):
            with FakeTensorMode() as mode:
                x = torch.ones(6, 10)
                out = F.dropout(x) + torch.rand_like(x) + torch.rand(6, 10) + torch.native_dropout(x, 0.5, True)[0]
                assert out.shape == x.shape
                torch.rand(3, device="cuda")
            F.dropout(mode.from_tensor(X)).uniform_()
            return torch.rand(4) + torch.rand(3, device="meta").numel()

    assert torch.equal(on_thread(work), drawn(lambda: torch.rand(4)) + 3)


# ---- regions


def test_a_region_inside_another_leaves_it_where_it_was() -> None:
    def work() -> torch.Tensor:
        with seeded(1):
            first = torch.rand(2)
            with seeded(2), seeded(None):
                inner = torch.rand(2)
            return torch.cat([first, inner, torch.rand(2)])

    found = on_thread(work)
    assert torch.equal(found[[0, 1, 4, 5]], drawn(lambda: torch.cat([torch.rand(2), torch.rand(2)]), 1))
    assert torch.equal(found[2:4], drawn(lambda: torch.rand(2), 2)) and torch.equal(found, work())


def test_threads_of_autograds_own_draw_as_the_one_that_called() -> None:
    """torch runs the backward on another thread where backwards call one another too deeply, and on other devices."""
    idents: list[int] = []
    drawn_there: list[torch.Tensor] = []

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, depth: int) -> torch.Tensor:  # type: ignore[override]
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
            if ctx.depth:
                with torch.enable_grad():
                    Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).backward()  # type: ignore[union-attr]
            else:
                idents.append(threading.get_ident())
                with seeded(2):
                    drawn_there.append(torch.rand(3))
                drawn_there.append(torch.rand(3))
            return g, None

    def work() -> torch.Tensor:
        with seeded(1):
            Deep.apply(torch.ones(1, requires_grad=True), 100).backward()  # type: ignore[union-attr]
        idents.append(threading.get_ident())
        return torch.cat(drawn_there)

    here = work()
    assert idents[0] != idents[1]
    drawn_there.clear()
    with seeded(7):  # neither is disturbed
        there = on_thread(work)
        assert torch.equal(torch.rand(3), drawn(lambda: torch.rand(3), 7))
    assert torch.equal(here, there)
    assert torch.equal(here, torch.cat([drawn(lambda: torch.rand(3), 2), drawn(lambda: torch.rand(3), 1)]))


def test_a_region_ends_with_an_exception() -> None:
    def work() -> torch.Tensor:
        with seeded(1):
            with pytest.raises(ZeroDivisionError), seeded(2):
                torch.rand(3)
                raise ZeroDivisionError
            inside = torch.rand(3)
        torch.manual_seed(0)
        return torch.cat([inside, torch.rand(3)])

    found = on_thread(work)
    assert torch.equal(found[:3], drawn(lambda: torch.rand(3), 1))
    assert torch.equal(found[3:], torch.rand(3, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("draw", [F.dropout, lambda x: x * torch.rand(10), lambda x: noise(x.detach()) * x])
def test_a_checkpoint_that_draws_is_refused_on_a_thread(draw: Callable[..., Any], reentrant: bool) -> None:
    def work() -> torch.Tensor:
        x = X.clone().requires_grad_()
        with seeded(3):
            y: Any = checkpoint(lambda x: draw(x.sin()), x, use_reentrant=reentrant)
        return torch.autograd.grad(y.sum(), x)[0] if not reentrant else y.detach()

    assert work().isfinite().all()
    with pytest.raises(ValueError, match=r"draws random numbers under torch\.utils\.checkpoint.*Take fz\.remat"):
        on_thread(work)


@in_turns(12, "compiled by torch")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
def test_a_compiled_checkpoint_that_would_replay_other_numbers_is_refused() -> None:
    inner = lambda x: F.dropout(x.sin()) * x.cos()
    fn = lambda x: checkpoint(inner, x, use_reentrant=False).exp()  # type: ignore[union-attr]
    code = torch.compile(fn, backend=inductor)

    def work(fn: Callable[..., Any]) -> torch.Tensor:
        x = X.clone().requires_grad_()
        with seeded(3):
            y = fn(x)
        return torch.autograd.grad(y.sum(), x)[0]

    torch.testing.assert_close(work(code), work(fn))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"dropout.*torch\.utils\.checkpoint.*fz\.remat"):
            on_thread(lambda: work(code))


def test_a_checkpoint_may_draw_other_numbers_where_it_is_asked_to() -> None:
    def work() -> torch.Tensor:
        x = torch.ones(10_000, requires_grad=True)
        with seeded(3):
            y = checkpoint(lambda x: F.dropout(x) * x, x, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(y, torch.Tensor)
        return torch.stack([y.detach(), torch.autograd.grad(y.sum(), x)[0]])

    y, grad = on_thread(work)
    assert not torch.equal(grad, 2 * y)


@torch.library.custom_op("fzero_tests::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def noise(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 0) + torch.rand(x.shape)


def test_an_operator_that_takes_no_generator_borrows_the_default_one() -> None:
    def work() -> torch.Tensor:
        return drawn(lambda: torch.cat([torch.rand(3), noise(torch.ones(3)), torch.rand(3)]))

    before = torch.get_rng_state()
    assert torch.equal(work(), on_thread(work))
    assert torch.equal(before, torch.get_rng_state())
    with seeded(1), pytest.raises(RuntimeError, match="fzero_tests::noise takes no generator"):
        on_thread(work)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(work(), on_thread(work))
