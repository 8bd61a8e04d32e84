"""The optimizer, its rate and clipping of a configuration, as code."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fzero.compat.deepspeed.keys import OPTIMIZERS, OTHERS
from fzero.compat.deepspeed.reading import (
    OF_TRAINER,
    Name,
    Reading,
    anything,
    betas,
    boolean,
    integer,
    nearest,
    number,
    text,
)
from fzero.compat.deepspeed.schedules import PARAMS, REQUIRED

_KINDS = {
    **dict.fromkeys(("lr", "eps", "weight_decay", "momentum", "muon_lr", "adam_lr"), number),
    "betas": betas,
    **dict.fromkeys(("adam_w_mode", "torch_adam", "amsgrad", "bias_correction", "per_head_muon"), boolean),
    "ns_method": text,
}
# what fzero has in one way only: it is refused otherwise
_ONLY = {
    "bias_correction": True, "eps_inside_sqrt": False, "per_head_muon": False, "fp32_optimizer_states": True,
    "max_grad_norm": 0, "max_coeff": None, "min_coeff": None,
}  # fmt: skip
_WITHOUT_EFFECT = ("torch_adam", "set_grad_none", "foreach", "fused", "capturable", "ns_method", "adam_w_mode")
TORCHS = [
    name
    for name, own in vars(torch.optim).items()
    if isinstance(own, type) and name not in ("Optimizer", "LBFGS", "SparseAdam")
]
MUON_NOT = "*[eE]mbed*|*lm_head*|*[nN]orm*|*bias"  # DeepSpeed tells matrices by their shapes, and leaves out two names


def optimizer_of(r: Reading, scale: str) -> None:
    """Adds the lines of `optimizer`: chained behind clipping and a factor of the gradients."""
    made = _made(r)
    clip = r.take("gradient_clipping", 1.0, number, least=0, open=True)
    chain = [f"fz.sgd(-{scale})"] if scale else []
    if clip:
        chain.append(f"fz.clip_by_global_norm({clip!r})")
        said = f"fz.clip_by_global_norm({clip!r})"
        r.honour("gradient_clipping", said)
        if "gradient_clipping" not in r.values:
            r.add("gradient_clipping", clip, "honoured", f"{said}: the default since 0.19; before, nothing was clipped")
    else:
        r.honour("gradient_clipping", "nothing is clipped")
    r.lines.append(f"optimizer = fz.chain({', '.join([*chain, made])})" if chain else f"optimizer = {made}")


def _made(r: Reading) -> str:
    """The optimizer without clipping, in code."""
    if not r.has("optimizer"):
        return _of_trainer(r)
    name = r.take("optimizer.type", None, text)
    if not isinstance(name, str):
        if "optimizer.type" not in r.values:
            r.add("optimizer.type", None, "refused", "there is an optimizer without a type. Say one, such as 'AdamW'")
        return "None"
    kind = name.lower()
    if kind in OTHERS:
        r.refuse("optimizer.type", "fzero has no such optimizer. AdamW, Lion, Muon and others are there")
        return "None"
    if kind not in OPTIMIZERS:
        return _of_torch(r, name)
    known, params = OPTIMIZERS[kind], r.under("optimizer.params")
    _unknown(r, params, [*known, *_ONLY], name)
    p = {
        key: r.take(f"optimizer.params.{key}", default, _KINDS.get(key, anything), open=True)
        for key, default in known.items()
    }
    adam = kind in ("adam", "adamw")
    if adam and p["torch_adam"] is True and "weight_decay" not in params and (kind == "adamw" or p["adam_w_mode"]):
        p["weight_decay"] = 0.01  # torch's own default
    decoupled = kind != "adam" or p["adam_w_mode"] is not False
    made = {"lamb": "lamb", "lion": "lion", "muon": "muon"}.get(kind, "adamw" if decoupled else "adam")
    r.honour("optimizer.type", f"fz.{made}" + (": adam_w_mode is true by default" if kind == made[:-1] else ""))
    if kind == "lamb":
        r.honour("optimizer.type", "fz.lamb: as published, with no bounds of the ratio and with corrected moments")
    for key in params:
        path = f"optimizer.params.{key}"
        if key in _ONLY and r.values[path] is not None and r.values[path] != _ONLY[key]:
            more = "; say gradient_clipping" if key == "max_grad_norm" else ""
            r.refuse(path, f"fz.{made} has no such choice. Leave it out{more}")
        elif key in _ONLY or key in _WITHOUT_EFFECT:
            r.hint(path, "it says what is so, or changes rounding alone")
        else:
            r.honour(path, f"fz.{made}")
    if kind == "muon":
        return _muon(r, p)
    first = _rate(r, p["lr"])
    return f"fz.{made}({', '.join([first, *_numbers(r, p, made)])})"


def _muon(r: Reading, p: Mapping[str, object]) -> str:
    momentum, decay = p["momentum"], p["weight_decay"]
    matrices, others = [_rate(r, p[key] if p[key] is not None else p["lr"], key[:-3]) for key in ("muon_lr", "adam_lr")]
    if "lr" not in r.under("optimizer.params") and p["adam_lr"] is None:
        others = _rate(r, 3e-4, "adam")
    adam = "adam" if p["adam_w_mode"] is False else "adamw"
    own = f"fz.muon({matrices}, momentum={momentum!r}, weight_decay={decay!r})"
    return f"fz.partition({{{MUON_NOT!r}: fz.{adam}({', '.join([others, *_numbers(r, p, adam)])}), '*': {own}}})"


def _numbers(r: Reading, p: Mapping[str, object], made: str) -> list[str]:
    """Arguments behind the rate: those that are not the default of fzero's own."""
    pair = p.get("betas")
    b1, b2 = (f"{pair}[0]", f"{pair}[1]") if isinstance(pair, Name) else [repr(b) for b in pair]  # type: ignore[union-attr]
    cycles = r.values.get("scheduler.params.cycle_momentum") is not False
    if cycles and r.values.get("scheduler.type") == "OneCycle":
        r.lines.append(f"momentum = {_schedule(r, None, momentum=True)}")
        b1, b2 = "momentum", "0.99"
    said = [f"b1={b1}"] if b1 != "0.9" else []
    said += [f"b2={b2}"] if b2 != ("0.99" if made == "lion" else "0.999") else []
    if "eps" in p and (made == "lamb" or p["eps"] != 1e-8):
        said.append(f"eps={p['eps']!r}")
    said.append(f"weight_decay={p['weight_decay']!r}")
    return [*said, "amsgrad=True"] if p.get("amsgrad") is True else said


def _of_torch(r: Reading, name: str) -> str:
    """A class of torch.optim."""
    kind = next((each for each in TORCHS if each.lower() == name.lower()), "")
    if not kind:
        r.refuse("optimizer.type", f"neither DeepSpeed nor torch.optim has it{nearest(name, [*OPTIMIZERS, *TORCHS])}")
        return "None"
    params = r.under("optimizer.params")
    first = _rate(r, r.take("optimizer.params.lr", 1e-2 if kind == "Adagrad" else 1e-3, number, open=True))
    rest = {key: r.take(f"optimizer.params.{key}", kind=anything, open=True) for key in params if key != "lr"}
    rest = {key: value for key, value in rest.items() if value not in (None, 0, False)}
    own = kind == "SGD" and {*rest} <= {"momentum", "weight_decay", "nesterov"}
    made = "fz.sgd" if own else f"fz.from_torch(torch.optim.{kind}"
    for key in params:
        r.honour(f"optimizer.params.{key}", made.partition("(")[0])
    r.honour("optimizer.type", made.replace("(", "(", 1) + ("" if own else ", ...)"))
    said = [f"{key}={tuple(value) if isinstance(value, list) else value!r}" for key, value in rest.items()]
    return f"{made}{'(' if own else ', '}{', '.join([first, *said])})"


def _of_trainer(r: Reading) -> str:
    """Where there is no optimizer, as in the templates of those who give theirs: values of the call make one."""
    given = {name: r.given[name] for name in OF_TRAINER if name in r.given}
    for name, value in given.items():
        r.add(name, value, "honoured", "the optimizer" if name == "optimizer" else "fz.adamw")
    if "optimizer" in given:
        _rate(r, None)
        return "optimizer"
    if "lr" not in given and not r.names:
        r.add("optimizer", None, "refused", "there is none. Give lr=, for AdamW, or optimizer=fz.adamw(...), say")
    r.add("optimizer", None, "honoured", "there is none: fz.adamw, with the defaults of Hugging Face's Trainer")
    if "lr" not in given:
        r.arguments.append(Name("lr"))
    pair = given.get("betas", [0.9, 0.999])
    if betas(pair) is None:
        r.add("betas", pair, "refused", "expected two numbers")
        pair = [0.9, 0.999]
    p = {"betas": pair, "eps": given.get("eps", 1e-8), "weight_decay": given.get("weight_decay", 0.0)}
    for name in ("lr", "betas", "eps", "weight_decay"):
        if name in given and (name != "lr" or number(given["lr"]) is not None):
            r.given.pop(name)  # it is in the code
    lr = given.get("lr", Name("lr"))
    return f"fz.adamw({', '.join([_rate(r, lr if number(lr) is not None else Name('lr')), *_numbers(r, p, 'adamw')])})"


def _rate(r: Reading, lr: object, of: str = "") -> str:
    """What the optimizer is given as its rate: a number or a name, or a schedule in a line before."""
    if not r.has("scheduler"):
        return repr(lr)
    if isinstance(lr, Name) and lr in r.given:
        r.refuse("scheduler.type", f"got {lr}= which is no number, and a schedule too. Keep one")
    if lr is None:
        r.refuse(
            "scheduler.type", "the optimizer is your own, so make it with fz.compat.deepspeed_schedule as its rate"
        )
        return "None"
    line = f"{of}_schedule"[not of :] + f" = {_schedule(r, lr)}"
    if line not in r.lines:
        r.lines.append(line)
    return line.partition(" ")[0]


def _schedule(r: Reading, lr: object, momentum: bool = False) -> str:
    params = r.under("scheduler.params")
    kind = r.take("scheduler.type", None, text, among=tuple(PARAMS))
    if not isinstance(kind, str):
        if "scheduler.type" not in r.values:
            r.add("scheduler.type", None, "refused", f"there is a scheduler without a type: one of {', '.join(PARAMS)}")
        return "None"
    known, made = PARAMS[kind], "fz.compat.deepspeed_schedule"
    r.honour("scheduler.type", f"{made}({kind!r}, ...)")
    _unknown(r, params, [*known], kind, "scheduler")
    said = []
    for name, default in known.items():
        path = f"scheduler.params.{name}"
        if default is REQUIRED and path not in r.values:
            r.add(path, None, "refused", f"{kind} needs it")
        trainers = {"warmup_min_lr": 0, "warmup_max_lr": lr}  # what Hugging Face's Trainer puts there
        if r.values.get(path) == "auto" and name in trainers and trainers[name] is not None:
            value = r.values[path] = trainers[name]
        else:
            counts = name.endswith(("num_steps", "step_size", "stair_count"))
            like = boolean if isinstance(default, bool) else text if isinstance(default, str) else number
            words = ("log", "linear") if name == "warmup_type" else ()
            value = r.take(path, None, integer if counts else like, among=words, open=True)
        r.honour(path, made)
        said += [f"{name}={value!r}"] if value is not None else []
    rate = "" if lr is None else f"{lr!r}"
    needs = kind == "WarmupCosineLR" or (kind == "WarmupLR" and "warmup_max_lr" not in " ".join(said))
    first = [repr(kind), *([rate] if rate and needs else [])]
    return f"{made}({', '.join([*first, *said, *(['momentum=True'] if momentum else [])])})"


def _unknown(r: Reading, params: Mapping[str, object], known: list[str], kind: str, block: str = "optimizer") -> None:
    for key in params:
        if key not in known:
            r.refuse(f"{block}.params.{key}", f"{kind} has no such parameter{nearest(key, known)}")
