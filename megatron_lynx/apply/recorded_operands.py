"""Refuses windows where torch would keep what their collectives read and write for longer than a plan counts.

stock     a synchronous collective: its operands are free when compute comes behind it
ours      the same collective, asynchronous, with the window's tasks behind it
          torch below 2.8: NCCL's `record_stream` keeps both operands until the host sees the collective over, and the host is far
          ahead of the device: several GiB more than planned, at 70B

Messages between stages are asynchronous in stock, too: their windows change nothing. On a CPU, gloo keeps its operands itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import distributed

from megatron_lynx.apply.live_run import LiveRun
from megatron_lynx.errors import Problem
from megatron_lynx.plan.plan import Plan
from megatron_lynx.plan.timetables import timetable_of
from megatron_lynx.torch_release import AVOIDS_RECORDING, records_operands


def refused_windows(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """Of the whole plan, not of one stage: all ranks say the same."""
    if not _over_nccl(run) or not records_operands(torch.__version__, os.environ):
        return
    if any(timetable_of(plan, stage).in_collectives for stage in range(plan.parallel.pipeline)):
        found = f"{os.environ.get(AVOIDS_RECORDING) or 'not set'}, with torch {torch.__version__.partition('+')[0]}"
        needed = "1 below torch 2.8 for a plan with windows: their collectives would hold memory until the host sees them over"
        yield Problem(AVOIDS_RECORDING, found, needed, f"export {AVOIDS_RECORDING}=1 on all nodes, or install torch 2.8 or later")


def _over_nccl(run: LiveRun) -> bool:
    on_cuda = any(parameter.is_cuda for chunk in run.chunks for parameter in chunk.parameters())  # a stage may have none
    return on_cuda or distributed.get_backend(run.tensor_group) == "nccl"
