"""Refuses what a launch may not ask for together with `--lynx-schedule double-buffered`.

Told from Megatron's validated arguments, before a model is built. What only the model and its optimizer show is told when
training begins (`double_buffered.match`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lynx.double_buffered import unproven
from megatron_lynx.double_buffered.unproven import Needed, otherwise
from megatron_lynx.errors import Problem

FLAG = "--lynx-schedule double-buffered"
ALONE = f"or drop {FLAG}"

NEEDED: Needed = {
    "rerun_mode": ("disabled", "batches overlap: none can be run again alone"),
    "rampup_batch_size": (None, "every batch must have as many micro-batches"),
    "step_batch_size_schedule": (None, "every batch must have as many micro-batches"),
    "decrease_batch_size_if_needed": (False, "every batch must have as many micro-batches"),
    "perform_rl_step": (False, "rollouts need weights that are one version, in every step"),
    "async_save": (False, "weights move to other memory while it saves"),
    "adlr_autoresume": (False, "it would save while micro-batches are in flight"),
    "inprocess_restart": (False, "what is in flight would be lost"),
    "save_wgrads_interval": (None, "gradients of the next batch have begun"),
    "save_dgrads_interval": (None, "gradients of the next batch have begun"),
    "save_params_interval": (None, "it was not tried"),
    "save_activations_interval": (None, "it would mix micro-batches of two batches"),
    "save_tokens_per_expert_interval": (None, "it would mix micro-batches of two batches"),
    "decoder_seq_length": (None, "all stages exchange messages of one length"),
    "vision_pretraining": (False, "it was not tried"),
    "hybrid_context_parallel": (False, "it has a schedule of its own"),
    "num_experts": unproven.MODEL["num_moe_experts"],
    "use_torch_fsdp2": (False, "it moves weights itself"),
    **{name: needed for name, needed in unproven.MODEL.items() if name != "overlap_p2p_comm"},  # interleaving sets it
    **unproven.DDP,
    **unproven.OPTIMIZER,
}
"""Megatron's arguments: what they must be, and why. One that a release does not have is as it must be."""


def problems(args: Any) -> Iterator[Problem]:
    """Every argument that does not go together with two versions of the weights."""
    yield from _layout(args)
    for name, found, needed, why in otherwise(args, NEEDED):
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
