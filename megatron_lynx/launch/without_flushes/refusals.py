"""Refuses what a launch may not ask for together with `--lynx-schedule double-buffered`.

Told from Megatron's validated arguments, before a model is built. What only the model and its optimizer show is told when
training begins (`double_buffered.match`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lynx.errors import Problem
from megatron_lynx.two_versions import LAUNCH, otherwise

FLAG = "--lynx-schedule double-buffered"
ALONE = f"or drop {FLAG}"


def problems(args: Any) -> Iterator[Problem]:
    """Every argument that does not go together with two versions of the weights."""
    yield from _layout(args)
    for name, found, needed, why in otherwise(args, LAUNCH):
        yield Problem(f"--{name.replace('_', '-')}", str(found), f"{needed} with {FLAG}", why)


def _layout(args: Any) -> Iterator[Problem]:
    stages, chunks = args.pipeline_model_parallel_size, getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    if stages == 1:
        yield Problem("--pipeline-model-parallel-size", "1", f"at least 2 with {FLAG}", f"one stage has no flush, {ALONE}")
    if chunks > 1:
        yield Problem("model chunks of each stage", str(chunks), f"1 with {FLAG}", "drop the flags of interleaving, " + ALONE)
    microbatches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
    if microbatches < stages:
        sizes = f"--global-batch-size {args.global_batch_size} / {args.micro_batch_size} / {args.data_parallel_size}"
        found = f"{microbatches} ({sizes})"
        needed = f"at least {stages}, one for each stage, with {FLAG}"
        yield Problem("micro-batches per update", found, needed, f"enlarge --global-batch-size, {ALONE}")
