"""What a launch communicates beside its computing. Only what differs from a job's own values is said."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_lynx.launch_arguments.fact import Fact
from megatron_lynx.launch_arguments.given import Given

SWITCHED_ON = {"gradients": "overlap_grad_reduce", "parameters": "overlap_param_gather"}
BUCKETS = {
    "bucket_parameters": "ddp_bucket_size",
    "buckets": "ddp_num_buckets",
    "padded_buckets": "ddp_pad_buckets_for_high_nccl_busbw",
}
LINEARS, MESSAGES, USERBUFFERS = "async_tensor_model_parallel_allreduce", "overlap_p2p_comm", "tp_comm_overlap"


IN_PLACE = "gradient_accumulation_fusion"
"""Without it a deferred weight gradient has nowhere to go."""


def overlap_facts(given: Given) -> Iterator[Fact]:
    for name, flag in SWITCHED_ON.items():
        if given[flag]:
            yield Fact(f"overlap.{name}", True, given.origin(flag))
    for name, flag in BUCKETS.items():
        if given[flag] is not None and given[flag] is not False:
            yield Fact(f"overlap.{name}", given[flag], given.origin(flag))
    for name, flag in (("linears", LINEARS), ("messages", MESSAGES)):
        if given[flag] is False:
            yield Fact(f"overlap.{name}", False, given.origin(flag))
    if given[IN_PLACE] is False:
        yield Fact("overlap.weight_gradients", "none", given.origin(IN_PLACE))
    if given[USERBUFFERS]:
        yield Fact("overlap.userbuffers", True, given.origin(USERBUFFERS))
