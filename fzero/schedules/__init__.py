"""Pipeline schedules as data: who computes which microbatch when, proofs that it can run, and how long it takes."""

from fzero.schedules.check import Report as Report
from fzero.schedules.check import check as check
from fzero.schedules.dual_pipe_v import dual_pipe_v as dual_pipe_v
from fzero.schedules.gpipe import gpipe as gpipe
from fzero.schedules.interleaved import interleaved as interleaved
from fzero.schedules.one_f_one_b import one_f_one_b as one_f_one_b
from fzero.schedules.simulate import Times as Times
from fzero.schedules.simulate import simulate as simulate
from fzero.schedules.task import Kind as Kind
from fzero.schedules.task import Schedule as Schedule
from fzero.schedules.task import Task as Task
from fzero.schedules.timeline import Span as Span
from fzero.schedules.timeline import Timeline as Timeline
from fzero.schedules.zero_bubble import zero_bubble as zero_bubble
