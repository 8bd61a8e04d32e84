"""A small student learns from a large teacher; the teacher only answers, and its params are cut by ZeRO-3, too.

In huggingface/accelerate#1305 a teacher without gradients beside a student makes ZeRO-3 crash, and the user asks
whether a teacher can be cut at all; accelerate now keeps an engine with a configuration of its own for each model. Here
each model is a step with a table of its own, in one loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

STEPS, EXAMPLES, CLASSES, TEMPERATURE = 5, 12, 4, 2.0
TEACHER, STUDENT = (3, 32, 32, CLASSES), (3, 8, CLASSES)


def batch(update: int) -> Tensor:
    return normal(update, EXAMPLES, 3)


def loss(student: Callable[[Tensor], Tensor], x: Tensor, answers: Tensor) -> Tensor:
    told, says = (answers / TEMPERATURE).softmax(1), (student(x) / TEMPERATURE).log_softmax(1)
    return TEMPERATURE**2 * F.kl_div(says, told, reduction="batchmean")


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    teach, wise = fz.functional(mlp(0, *TEACHER))
    apply, params = fz.functional(mlp(50, *STUDENT))
    teacher = fz.shard_zero3(fz.freeze(fz.train_step(teach, fz.sgd(0.0)), "*"))  # no gradients, no moments
    student = fz.shard_zero3(fz.train_step(lambda p, *batch: loss(lambda x: apply(p, x), *batch), fz.adamw(1e-2)))
    teacher_state, state = teacher.init(wise), student.init(params)
    for update in range(STEPS):
        x = batch(update).chunk(ranks)[rank]
        state, _ = student(state, x, teacher.forward(teacher_state, x))
    return fz.gather(state.params)


def plain() -> Mapping[str, Tensor]:
    teacher, student = mlp(0, *TEACHER), mlp(50, *STUDENT)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for update in range(STEPS):
        optimizer.zero_grad()
        with torch.no_grad():
            answers = teacher(batch(update))
        loss(student, batch(update), answers).backward()
        optimizer.step()
    return {name: param.detach() for name, param in student.named_parameters()}


if __name__ == "__main__":
    compare(main, plain)
