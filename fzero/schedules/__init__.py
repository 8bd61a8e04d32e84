"""Pipeline schedules as data: who computes which microbatch when, proofs that it can run, and how long it takes."""

from fzero.schedules.check import Report, check
from fzero.schedules.dual_pipe_v import dual_pipe_v
from fzero.schedules.gpipe import gpipe
from fzero.schedules.interleaved import interleaved
from fzero.schedules.one_f_one_b import one_f_one_b
from fzero.schedules.simulate import Times, simulate
from fzero.schedules.task import Kind, Schedule, Task
from fzero.schedules.timeline import Span, Timeline
from fzero.schedules.zero_bubble import zero_bubble

__all__ = [
    "Kind",
    "Report",
    "Schedule",
    "Span",
    "Task",
    "Timeline",
    "Times",
    "check",
    "dual_pipe_v",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "simulate",
    "zero_bubble",
]
__dir__ = __all__.copy  # without the modules that the names come from
