"""Megatron's arguments for a plan's assignment of layers to ranks.

    all virtual stages alike                        nothing; with chunks --num-layers-per-virtual-pipeline-stage n
    no chunks, only the ends differ                 --decoder-first-pipeline-num-layers a, --decoder-last-pipeline-num-layers b
    anything else                                   --pipeline-model-parallel-layout 'Et*3|(t*4|)*6t*3L'
    without flushes                                 --lynx-schedule double-buffered --rerun-mode disabled

The layout's text lists virtual stages in layer order: E embedding, t a transformer layer, m one of multi-token prediction, L
loss, | a boundary.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import groupby

from megatron_lynx.plan.plan import Plan


def launch_flags(plan: Plan) -> tuple[str, ...]:
    layout = plan.parallel
    flags = [f"--num-layers {plan.model.layers}", f"--tensor-model-parallel-size {layout.tensor}"]
    flags.append(f"--pipeline-model-parallel-size {layout.pipeline}")
    flags += ["--sequence-parallel"] if layout.sequence_parallel else []
    flags += [f"--context-parallel-size {layout.context}"] if layout.context > 1 else []
    flags += ["--tp-comm-overlap"] if layout.userbuffers else []
    flags += [f"--mtp-num-layers {plan.model.mtp}"] if plan.model.mtp else []
    flags += layer_flags(plan)
    if layout.group != layout.pipeline:
        flags.append(f"--microbatch-group-size-per-virtual-pipeline-stage {layout.group}")
    return (*flags, f"--micro-batch-size {plan.batch.micro}", *schedule_flags(plan))


def layer_flags(plan: Plan, *, chunks_counted: bool = False) -> tuple[str, ...]:
    """Empty for Megatron's default. `chunks_counted`: give the number of equal chunks instead of their layers."""
    counts = [len(stage.layers) for stage in plan.stages]
    if len(set(counts)) == 1 and plan.parallel.chunks == 1:
        return ()
    if len(set(counts)) == 1 and chunks_counted:
        return (f"--num-virtual-stages-per-pipeline-rank {plan.parallel.chunks}",)
    if len(set(counts)) == 1:
        return (f"--num-layers-per-virtual-pipeline-stage {counts[0]}",)
    if plan.parallel.chunks == 1 and len(set(counts[1:-1])) <= 1 and 0 not in counts:
        middle, ends = counts[1] if len(counts) > 2 else None, (("first", counts[0]), ("last", counts[-1]))
        return tuple(f"--decoder-{end}-pipeline-num-layers {count}" for end, count in ends if count != middle)
    return (f"--pipeline-model-parallel-layout {shlex.quote(layout_text(counts, plan.model.mtp))}",)


def schedule_flags(plan: Plan) -> tuple[str, ...]:
    return () if plan.schedule == "flush" else ("--lynx-schedule double-buffered", "--rerun-mode disabled")


def layout_text(counts: Sequence[int], mtp: int = 0) -> str:
    """Megatron's text for these layers of virtual stages, in layer order. `mtp`: layers of multi-token prediction after them."""
    decoders = [f"t*{count}" if count > 1 else "t" * count for count in counts]
    decoders[0] = f"E{decoders[0]}"
    *before, last = decoders
    runs = ((text, len(list(same))) for text, same in groupby(before))
    return "".join(f"({text}|)*{length}" if length > 1 else f"{text}|" for text, length in runs) + f"{last}{'m' * mtp}L"


def in_words(plan: Plan) -> str:
    size = plan.batch.micro * plan.batch.microbatches
    return " \\\n".join(launch_flags(plan)) + f"\n(--global-batch-size is {size} x the data-parallel size)"
