"""The optimizer, its schedule and clipping of a configuration, as code."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping

import torch

from fzero.compat.deepspeed.keys import ONLY, OPTIMIZERS, OTHERS
from fzero.compat.deepspeed.reading import AUTO, Name, Reading, nearest
from fzero.compat.deepspeed.schedules import PARAMS, REQUIRED

_KINDS: dict[str, str] = dict.fromkeys(("lr", "eps", "weight_decay", "momentum", "muon_lr", "adam_lr"), "a number")
_KINDS |= {**dict.fromkeys(("adam_w_mode", "torch_adam", "amsgrad"), "true or false"), "betas": "two numbers in [0, 1)"}
_WITHOUT_EFFECT = ("torch_adam", "set_grad_none", "foreach", "fused", "capturable", "ns_method")
_TORCHS = [name for name, own in vars(torch.optim).items() if isinstance(own, type) and name != "Optimizer"]
_NO_MATRICES = "*[eE]mbed*|*lm_head*|*[nN]orm*|*bias"  # DeepSpeed asks shapes, and leaves out the first two


def optimizer_of(r: Reading, scale: str) -> None:
    """Adds the lines of `optimizer`, behind clipping and what gradients are multiplied by."""
    chain = [_made(r)]
    if clip := r.take("gradient_clipping", 1.0, "a number", 0, open=True):
        none = " or torch.inf" * (clip in r.arguments)  # 0 for none, as in DeepSpeed
        chain.insert(0, said := f"fz.clip_by_global_norm({clip!r}{none})")
        r.honour("gradient_clipping", said)
        r.add("gradient_clipping", clip, "honoured", f"{said}: the default since 0.19; before, nothing was clipped")
    if scale:
        chain.insert(0, f"fz.sgd(-{scale})")
    said = ", ".join(chain)
    r.lines.append(f"optimizer = fz.chain({said})" if len(chain) > 1 else f"optimizer = {said}")


def _made(r: Reading) -> str:
    if "optimizer" in r.given:
        r.add("optimizer", r.given["optimizer"], "honoured", "the optimizer")
        if r.has("optimizer"):
            r.refuse("optimizer.type", "got optimizer= too. Keep one")
        if r.has("scheduler"):
            r.refuse("scheduler.type", "the optimizer is your own. Give it fz.compat.deepspeed_schedule as its rate")
        return "optimizer"
    name = r.take("optimizer.type", None, "a string")
    kind = name.lower() if isinstance(name, str) else ""
    if kind not in OPTIMIZERS:
        return _of_torch(r, kind)
    _need_known(r, "optimizer", OPTIMIZERS[kind])
    p = {key: _param(r, key, default) for key, default in OPTIMIZERS[kind].items()}
    made = kind if kind in ("lamb", "lion", "muon") else "adamw" if kind == "adamw" or p["adam_w_mode"] else "adam"
    if made == "adamw" and p["torch_adam"] and "weight_decay" not in r.under("optimizer.params"):
        p["weight_decay"] = 0.01  # torch's own default
    more = {"lamb": ", as published: nothing bounds its ratio", "muon": ": fz.partition tells matrices by their names"}
    r.honour("optimizer.type", f"fz.{made}{more.get(made, '')}")
    for key in r.under("optimizer.params"):
        path = f"optimizer.params.{key}"
        if key in _WITHOUT_EFFECT or (key == "adam_w_mode" and kind == "adamw"):
            r.hint(path, "it changes rounding alone")
        r.honour(path, f"fz.{made}")
    if kind != "muon":
        return f"fz.{made}({', '.join([_rate(r, p['lr']), *_numbers(r, p, made)])})"
    matrices, others = p["muon_lr"] or p["lr"], p["adam_lr"] or (p["lr"] if r.has("optimizer.params.lr") else 3e-4)
    adam = f"fz.adam{'w' * (p['adam_w_mode'] is True)}({', '.join([_rate(r, others, 'adam_'), *_numbers(r, p, '')])})"
    muon = f"fz.muon({_rate(r, matrices)}, momentum={p['momentum']!r}, weight_decay={p['weight_decay']!r})"
    return f"fz.partition({{{_NO_MATRICES!r}: {adam}, '*': {muon}}})"


def _param(r: Reading, key: str, default: object) -> object:
    kind = _KINDS.get(key, "a value")
    least, flag = 0 if kind == "a number" else -math.inf, kind == "true or false"
    return r.take(f"optimizer.params.{key}", default, kind, least, open=not flag)  # a flag decides what the code is


def _numbers(r: Reading, p: Mapping[str, object], made: str) -> list[str]:
    """Arguments behind the rate: those that are not fzero's own defaults."""
    pair = p["betas"]
    b1, b2 = (f"{pair}[0]", f"{pair}[1]") if isinstance(pair, Name) else map(repr, pair)  # type: ignore[call-overload]
    if r.values.get("scheduler.type") == "OneCycle" and r.flag("scheduler.params.cycle_momentum", True):
        r.lines.append(f"momentum = {_schedule(r, None, momentum=True)}")
        b1, b2 = "momentum", "0.99"  # as DeepSpeed has them then
    said = [f"b1={b1}"] * (b1 != "0.9") + [f"b2={b2}"] * (b2 != ("0.99" if made == "lion" else "0.999"))
    said += [f"eps={p['eps']!r}"] if p.get("eps", 1e-8) != 1e-8 or made == "lamb" else []
    return [*said, f"weight_decay={p['weight_decay']!r}", *["amsgrad=True"] * (p.get("amsgrad") is True)]


def _of_torch(r: Reading, kind: str) -> str:
    """A class of torch.optim."""
    name = next((name for name in _TORCHS if name.lower() == kind), "")
    if not name or kind in OTHERS:
        near = "" if kind in OTHERS else nearest(kind, [*OPTIMIZERS, *_TORCHS])
        r.refuse("optimizer.type", f"fzero has no such optimizer{near}")
        return "None"
    known = {key: own.default for key, own in inspect.signature(getattr(torch.optim, name)).parameters.items()}
    _need_known(r, "optimizer", known)
    rest = {key: _param(r, key, None) for key in r.under("optimizer.params") if key in known and key != "lr"}
    rest = {key: tuple(x) if isinstance(x, list) else x for key, x in rest.items() if x not in (None, known[key])}
    own = name == "SGD" and {*rest} <= {"momentum", "weight_decay", "nesterov"}
    first = _rate(r, _param(r, "lr", known["lr"]))
    for key in ["type", *[f"params.{key}" for key in r.under("optimizer.params")]]:
        r.honour(f"optimizer.{key}", "fz.sgd" if own else f"fz.from_torch(torch.optim.{name}, ...)")
    said = ", ".join([first, *[f"{key}={x!r}" for key, x in rest.items()]])
    return f"fz.sgd({said})" if own else f"fz.from_torch(torch.optim.{name}, {said})"


def _rate(r: Reading, lr: object, of: str = "") -> str:
    """The first argument of an optimizer: its rate, or the name of a schedule in a line before."""
    if not r.has("scheduler"):
        return repr(lr)
    if isinstance(lr, Name) and lr in r.given:
        r.refuse("scheduler.type", f"got {lr}= that is no number, and a schedule too. Keep one")
    r.lines.append(f"{of}schedule = {_schedule(r, lr)}")
    return f"{of}schedule"


def _schedule(r: Reading, lr: object, momentum: bool = False) -> str:
    kind = r.take("scheduler.type", None, "a string", among=tuple(PARAMS))
    if not isinstance(kind, str):
        r.add("scheduler.type", None, "refused", f"a scheduler needs a type: one of {', '.join(PARAMS)}")
        return "None"
    made, known, said = "fz.compat.deepspeed_schedule", PARAMS[kind], list[str]()
    _need_known(r, "scheduler", known)
    r.honour("scheduler.type", f"{made}({kind!r}, ...)")
    for name, default in known.items():
        path = f"scheduler.params.{name}"
        if default is REQUIRED:
            r.add(path, None, "refused", f"{kind} needs it")
        trainers = {"warmup_min_lr": 0, "warmup_max_lr": lr}.get(name)  # as Hugging Face's Trainer fills them
        if r.values.get(path) == AUTO and trainers is not None:
            r.values[path], r.written[path] = trainers, (r.written[path][0], trainers)
        like = "true or false" if isinstance(default, bool) else "a string" if isinstance(default, str) else "a number"
        like = "an int" if name.endswith(("num_steps", "step_size", "stair_count")) else like
        least = 1 if name.endswith(("num_steps", "_step_size")) and name != "decay_step_size" else 0
        own = ("log", "linear") if name == "warmup_type" else ()
        value = r.take(path, None, like, least if like in ("an int", "a number") else -math.inf, own, open=True)
        r.honour(path, made)
        said += [f"{name}={value!r}"] if value is not None else []
    first = kind == "WarmupCosineLR" or (kind == "WarmupLR" and not r.has("scheduler.params.warmup_max_lr"))
    said = [repr(kind), *[repr(lr)] * first, *said, *["momentum=True"] * momentum]
    return f"{made}({', '.join(said)})"


def _need_known(r: Reading, block: str, known: Iterable[str]) -> None:
    for key in r.under(f"{block}.params"):
        if key not in known and f"{block}.params.{key}" not in ONLY:
            r.refuse(f"{block}.params.{key}", f"its {block} has no such parameter{nearest(key, known)}")
