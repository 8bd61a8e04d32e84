"""The optimizer, its schedule and clipping of a configuration, as code."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

import torch

from fzero.compat.deepspeed.keys import ONLY, OPTIMIZERS, OTHERS
from fzero.compat.deepspeed.reading import AUTO, Name, Reading, nearest
from fzero.compat.deepspeed.schedules import PARAMS, REQUIRED, Given

_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "muon_lr", "adam_lr", "warmup_max_lr")
_WITHOUT_EFFECT = ("torch_adam", "set_grad_none", "foreach", "fused", "capturable", "ns_method")
_TORCHS = [name for name, own in vars(torch.optim).items() if isinstance(own, type) and name != "Optimizer"]
_NO_MATRICES = "*[eE]mbed*|*lm_head*|*[nN]orm*|*bias"  # DeepSpeed asks shapes, and leaves out the first two
_LAMB = "as published: DeepSpeed bounds its ratio by 0.01 and 10, and corrects the bias behind it"


def optimizer_of(r: Reading, scale: str) -> None:
    """Adds the lines of `optimizer`, behind clipping and what gradients are multiplied by."""
    chain = [f"fz.sgd(-{scale})"] * bool(scale)
    if clip := r.take("gradient_clipping", 1.0, least=0, open=True):
        none = " or torch.inf" * (clip in r.arguments)  # 0 for none, as in DeepSpeed
        chain.append(f"fz.clip_by_global_norm({clip!r}{none})")
        r.honour(chain[-1], "gradient_clipping")
        r.add("gradient_clipping", clip, f"{chain[-1]}: the default since 0.19; before, nothing was clipped")
    chain.append(_made(r))
    r.lines.append(f"optimizer = fz.chain({', '.join(chain)})" if len(chain) > 1 else f"optimizer = {chain[0]}")


def _made(r: Reading) -> str:
    if "optimizer" in r.given:
        r.add("optimizer", r.given["optimizer"], "the optimizer")
        if r.has("optimizer"):
            r.refuse("got optimizer= too. Keep one", "optimizer.type")
        if r.has("scheduler"):
            r.refuse("the optimizer is your own. Give it fz.compat.deepspeed_schedule as its rate", "scheduler.type")
        return "optimizer"
    kind = r.take("optimizer.type", "").lower()
    if kind not in OPTIMIZERS:
        return _of_torch(r, kind)
    without = [*_WITHOUT_EFFECT, *["adam_w_mode"] * (kind == "adamw")]
    r.hint("it changes rounding alone", *[f"optimizer.params.{key}" for key in without])
    given = _params(r, "optimizer", OPTIMIZERS[kind])
    p = {**OPTIMIZERS[kind], **given}
    made = kind if kind != "adam" else "adamw" if p["adam_w_mode"] else "adam"
    if made == "adamw" and p["torch_adam"]:
        p["weight_decay"] = given.get("weight_decay", 0.01)  # torch's own default
    r.honour(f"fz.{made}{f', {_LAMB}' * (made == 'lamb')}", "optimizer.type")
    r.honour(f"fz.{made}", *r.under("optimizer.params"))
    if kind != "muon":
        return f"fz.{made}({', '.join([_rate(r, p['lr']), *_numbers(r, p, made)])})"
    others = _rate(r, given.get("adam_lr", given.get("lr", 3e-4)), "adam_")
    adam = f"fz.adam{'w' * p['adam_w_mode']}({', '.join([others, *_numbers(r, p, '')])})"
    matrices = _rate(r, given.get("muon_lr", p["lr"]))
    muon = f"fz.muon({matrices}, momentum={p['momentum']!r}, weight_decay={p['weight_decay']!r})"
    return f"fz.partition({{{_NO_MATRICES!r}: {adam}, '*': {muon}}})"


def _params(r: Reading, block: str, known: Mapping[str, object]) -> Given:
    """The parameters that a block gives; those that are not known are refused."""
    given = dict[str, object]()
    for path in r.under(f"{block}.params"):
        key = path.removeprefix(f"{block}.params.")
        if key not in known and path not in ONLY:
            r.refuse(f"its {block} has no such parameter{nearest(key, known)}", path)
        if key not in known or not r.has(path):
            continue
        default, steps = known[key], key.endswith(("num_steps", "step_size", "stair_count"))
        number = key in _NUMBERS or default is REQUIRED or type(default) in (int, float)
        kind = "an int" if steps else "two numbers in [0, 1)" if key == "betas" else "a number" if number else ""
        least = 1 if key.endswith(("num_steps", "first_step_size", "second_step_size", "test_step_size")) else 0
        among = ("log", "linear") * (key == "warmup_type")
        open = not isinstance(default, bool)  # a flag decides what the code is
        given[key] = r.take(path, default, kind, least, among, open)
    return given


def _numbers(r: Reading, p: Given, made: str) -> list[str]:
    """Arguments behind the rate: those that are not fzero's own defaults."""
    pair = p["betas"]
    b1, b2 = (f"{pair}[0]", f"{pair}[1]") if isinstance(pair, Name) else map(repr, pair)
    if r.values.get("scheduler.type") == "OneCycle" and r.take("scheduler.params.cycle_momentum", True):
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
        r.refuse(f"fzero has no such optimizer{near}", "optimizer.type")
        return "None"
    known = {key: own.default for key, own in inspect.signature(getattr(torch.optim, name)).parameters.items()}
    given = _params(r, "optimizer", known)
    first = _rate(r, given.get("lr", known["lr"]))
    rest = {key: tuple(x) if isinstance(x, list) else x for key, x in given.items() if x != known[key] and key != "lr"}
    own = name == "SGD" and {*rest} <= {"momentum", "weight_decay", "nesterov"}
    r.honour("fz.sgd" if own else f"fz.from_torch(torch.optim.{name}, ...)", *r.under("optimizer"))
    said = ", ".join([first, *[f"{key}={x!r}" for key, x in rest.items()]])
    return f"fz.sgd({said})" if own else f"fz.from_torch(torch.optim.{name}, {said})"


def _rate(r: Reading, lr: object, of: str = "") -> str:
    """The first argument of an optimizer: its rate, or the name of a schedule in a line before."""
    if not r.has("scheduler"):
        return repr(lr)
    if isinstance(lr, Name) and lr in r.given:
        r.refuse(f"got {lr}= that is no number, and a schedule too. Keep one", "scheduler.type")
    r.lines.append(f"{of}schedule = {_schedule(r, lr)}")
    return f"{of}schedule"


def _schedule(r: Reading, lr: object, momentum: bool = False) -> str:
    kind = r.take("scheduler.type", None, "a string", among=tuple(PARAMS))
    if kind is None:
        r.refuse(f"a scheduler needs a type: one of {', '.join(PARAMS)}", "scheduler.type")
        return "None"
    for key, value in (("warmup_min_lr", 0), ("warmup_max_lr", lr)):  # as Hugging Face's Trainer fills them
        if r.values.get(path := f"scheduler.params.{key}") == AUTO:
            r.values[path], r.written[path] = value, (r.written[path][0], value)
    given = _params(r, "scheduler", PARAMS[kind])
    for key in [key for key, default in PARAMS[kind].items() if default is REQUIRED and key not in given]:
        r.refuse(f"{kind} needs it", f"scheduler.params.{key}")
    r.honour(f"fz.compat.deepspeed_schedule({kind!r}, ...)", *r.under("scheduler"))
    first = kind == "WarmupCosineLR" or (kind == "WarmupLR" and "warmup_max_lr" not in given)
    said = [repr(kind), *[repr(lr)] * first, *[f"{key}={value!r}" for key, value in given.items()]]
    return f"fz.compat.deepspeed_schedule({', '.join([*said, *['momentum=True'] * momentum])})"
