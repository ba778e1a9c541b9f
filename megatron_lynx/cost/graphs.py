"""Memory of captured CUDA graphs besides the tensors that their modules save (`model.captured`).

    pool       the saved tensors, counted with the layers; graphs never free them, so they are live during updates, too
    masks      b s/c s bytes per layer and micro-batch in flight if `attn` is captured: b sequences of s tokens over c
               context-parallel ranks; plus one per call
    workspace  graphs share one pool that other code cannot use: the transients of the widest captured half
    gradients  one per output of a graph (A: the residual stream of a micro-batch)

Source: `TransformerLayer.get_layer_static_inputs` (mask), `TECudaGraphHelper._get_sample_arguments` (static inputs are reused
after the backward that read them) and Transformer Engine's `make_graphed_callables` (one pool; all graphs share the outputs'
static gradients). These are estimates.
"""

from __future__ import annotations

from megatron_lynx.anatomy import ATTENTION, HALVES, Section
from megatron_lynx.config.job import Job
from megatron_lynx.cost.in_hand import alone_in_hand_bytes
from megatron_lynx.cost.layer import half_kept_bytes
from megatron_lynx.kinds.captured import ROUTER
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.shape import LayerShape

OUTPUTS_OF_ROUTER = 3
"""Outputs of a captured router: rows, residual stream, shared experts' output."""


def graph_buffers_bytes(job: Job, shape: LayerShape, stage: int, chunks: int) -> int:
    """Return masks, workspace and static gradients of a stage's graphs. `chunks`: in flight."""
    if not job.model.captured:
        return 0
    sections = {section for kind in job.kinds_on(stage) for section in kind}
    captured = [section for section in sections if section.captured]
    outputs = max((OUTPUTS_OF_ROUTER if section.apart else 1 for section in sections if _in_graph(job, section)), default=0)
    working = max((alone_in_hand_bytes(shape, section) for section in captured), default=0)
    masks = chunks * max(len(job.layers_of(stage, chunk)) for chunk in range(job.chunks)) + 1
    masked = any(section.half == ATTENTION.half for section in captured)
    return outputs * shape.input_bytes + working + (masks * mask_bytes(shape) if masked else 0)


def mask_bytes(shape: LayerShape) -> int:
    """Return the static mask of one layer and micro-batch: one byte per query and key."""
    return shape.micro * shape.model.seq // shape.parallel.context * shape.model.seq


def pool_bytes(job: Job, shape: LayerShape, stage: int) -> int:
    """Return the tensors of one micro-batch saved by the graphs of a stage's largest chunk."""
    if not job.model.captured:
        return 0
    of_chunk = (job.kinds_of(stage, chunk).items() for chunk in range(job.chunks))
    return max(sum(count * sum(_kept(job, shape, each) for each in kind) for kind, count in kinds) for kinds in of_chunk)


def _kept(job: Job, shape: LayerShape, section: Section) -> int:
    if section.captured:
        return half_kept_bytes(shape, section)
    if not _in_graph(job, section):
        return 0
    own = set(section.apart) - {section.residual}
    tensors = planning_of(section).tensors(shape)
    return shape.input_bytes + sum(each.bytes for each in tensors if each.saved_by and own.issuperset(each.saved_by))


def _in_graph(job: Job, section: Section) -> bool:
    return section.captured or (section.exchanges and ROUTER in job.model.captured and section.half == HALVES[-1])
