"""Measures both halves of a real layer by item."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_lynx.anatomy import DENSE, Half, Section
from megatron_lynx.config.job import Job
from megatron_lynx.profiler.measured.blocks import blocks_of
from megatron_lynx.profiler.measured.half_run import HalfRun, InnerNorm, nbytes_of, sites_of
from megatron_lynx.profiler.measured.head_start import HeadStart, head_start_on
from megatron_lynx.profiler.measured.seconds import gradient_gemm_seconds, item_flops, item_seconds
from megatron_lynx.profiler.profile import HalfProfile, ItemProfile

if TYPE_CHECKING:
    from megatron_lynx.runtime.device import Device


def shard_arguments(job: Job) -> dict[str, Any]:
    """Return arguments of `TransformerConfig` that give a layer without a group the work of one tensor-parallel rank."""
    model, tensor = job.model, job.parallel.tensor
    return {
        "num_attention_heads": model.heads // tensor,
        "num_query_groups": model.kv_groups // tensor,
        "kv_channels": model.head_size,
        "ffn_hidden_size": model.ffn // tensor,
        "sequence_parallel": False,
    }


@dataclass(frozen=True)
class TeLayer:
    """Facts about a Transformer Engine layer that hooks cannot observe."""

    norms: Mapping[Half, Mapping[str, InnerNorm]]
    flops: Mapping[str, int]
    """FLOPs per item: torch does not count Transformer Engine's extension."""
    fp8: bool = False
    """Whether its linears compute in FP8. Each backward GEMM then counts as long as the forward's."""


def measure_layer(
    layer: Any,
    hidden: Tensor,
    arguments: dict[str, Any],
    device: Device,
    *,
    sections: Iterable[Section] = tuple(DENSE.values()),
    sequence_shards: int = 1,
    repetitions: int = 9,
    te: TeLayer | None = None,
) -> dict[Half, HalfProfile]:
    """Measure both halves of a `TransformerLayer` in training mode. `sections`: their contents.

    `hidden` is the layer's input on all rows; `arguments` are the other arguments of its forward (mask, rotary tables). `device`
    is the layer's device, whose clock is used. `sequence_shards` is the tensor-parallel size under sequence parallelism: figures
    of norms, dropouts and residuals, which work on a part of the rows, are divided by it. For FP8 the caller enters its context.
    """

    runs, head_start = list[HalfRun](), head_start_on(device)
    for section in sections:
        start, given = (runs[-1].output().detach(), {}) if runs else (hidden, arguments)
        sites = sites_of(layer, section, norms=te is None)
        norms = {} if te is None else te.norms[section.half]
        runs.append(HalfRun(section, getattr(layer, section.method), given, start, sites, norms))
    return {run.section.half: _profile(run, head_start, sequence_shards, repetitions, te) for run in runs}


def _profile(run: HalfRun, head_start: HeadStart, shards: int, repetitions: int, te: TeLayer | None) -> HalfProfile:
    forward, backward = item_seconds(run, head_start, repetitions)
    tensors, outputs = blocks_of(run)
    flops = item_flops(run) if te is None else te.flops
    if te is not None and te.fp8:
        gemms = {item: (forward[item], forward[item]) for item in run.section.linears}
    else:
        gemms = gradient_gemm_seconds(run, head_start, repetitions)
    section = run.section

    def share(item: str) -> int:
        return shards if item in section.on_own_rows else 1

    tensors = tuple(tensor.model_copy(update={"bytes": tensor.bytes // share(tensor.made_by)}) for tensor in tensors)
    items = {
        item: ItemProfile(
            forward_s=forward.get(item, 0.0) / share(item),
            backward_s=backward.get(item, 0.0) / share(item),
            saved_bytes=sum(tensor.bytes for tensor in tensors if tensor.saved_by[:1] == (item,)),
            output_bytes=outputs.get(item, 0) // (shards if item in (*section.on_own_rows, section.row_parallel) else 1),
            flops=flops.get(item, 0),
            dgrad_s=gemms.get(item, (0.0, 0.0))[0],
            wgrad_s=gemms.get(item, (0.0, 0.0))[1],
        )
        for item in section.names
    }
    return HalfProfile(input_bytes=nbytes_of(run.input) // shards, items=items, tensors=tensors)
