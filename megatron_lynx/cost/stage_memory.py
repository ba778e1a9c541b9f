"""Peak memory of one device, by kind.

    parameters  gradients  optimizer       always
    rest                                   workspaces
    learned                                observed by a run besides all of these; below 0 if it used less
    buffers                                Megatron's global buffer; Transformer Engine's dummy weight gradients; userbuffers;
                                           masks and workspace of captured graphs
    activations                            layers, all chunks in flight; with offloading, the share that stays
    staging                                with stock's offloading: tensors that are being copied
    messages                               with a pipeline: messages being sent and received
    embedding                              first stage: dropout masks
    head  logits                           last stage: inputs of final norm and output projection; all copies of the logits
    recomputed                             most that recomputation adds while one micro-batch runs backward
    in_hand                                transient gradients in a layer, the head or the embedding; tokens in flight to and from
                                           experts, and tensors that dispatchers keep of their last call
    update_copies                          fp32 copies made by an update
    fp8_weights                            FP8 copies of the linears' weights, or their bytes by columns
    second_weights                         without flushes: the other version of the parameters
    second_gradients                       with deferred updates, on all stages but the first: the next batch's

Captured CUDA graphs (`model.captured`) hold, besides the tensors that their modules save:

    pool       the saved tensors, counted with the layers; graphs never free them, so they are live during updates, too
    masks      b s/c s bytes per layer and micro-batch in flight if `attn` is captured, plus one per call
    workspace  graphs share one pool that other code cannot use: the transients of the widest captured half
    gradients  one per output of a graph

Source: `TransformerLayer.get_layer_static_inputs` (mask), `TECudaGraphHelper._get_sample_arguments` (static inputs are reused
after the backward that read them) and Transformer Engine's `make_graphed_callables`. These are estimates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from megatron_lynx.anatomy import ATTENTION, HALVES, Section
from megatron_lynx.config.job import Job
from megatron_lynx.cost import ends, moments, muon, parameters
from megatron_lynx.cost.communication import userbuffers_bytes
from megatron_lynx.cost.host_optimizer import made_bytes
from megatron_lynx.cost.moments import Moment, Parts, StageMemory
from megatron_lynx.cost.recompute import beyond_fp8_bytes, half_kept_bytes, kept_bytes
from megatron_lynx.cost.stage import chunks_in_flight, microbatches_in_flight, most_in_flight_bytes, of_every_stage
from megatron_lynx.kinds.captured import ROUTER
from megatron_lynx.kinds.experts.planning import as_held, gathered_tokens, remembered_bytes, routed_rows
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.shape import LayerShape, embedding_bytes, head_bytes

REST_BYTES = {"cuda": 100_000_000, "cpu": 0}
"""Allocations not counted elsewhere: cuBLAS workspaces, 32 MiB for each of the forward and backward threads (PyTorch's default on
Hopper), and Transformer Engine's, as large. CUDA's context and NCCL are in the cluster's reserve. The CPU testbed has none."""


def always_bytes(job: Job) -> int:
    """Return the fullest stage's bytes before any activation: independent of policy and micro-batch size."""
    stages = of_every_stage(job, lambda stage: _states(job, stage))
    return max(parts.states.always for parts in stages) + REST_BYTES[job.cluster.device]


@lru_cache(maxsize=1024)
def parts_beside_layers(job: Job, stage: int, *, layer_whole: bool = False, overlapped: bool = False) -> Parts:
    """Return a stage's parts without saved and recomputed tensors of its layers. `layer_whole`: count a whole layer's
    transients, as stock's checkpoints need; else a half's. `overlapped`: experts' exchanges are, even if the job has
    them apart."""
    shape = LayerShape.of(job)
    first, last = stage == 0, stage == job.parallel.pipeline - 1
    states, experts = _states(job, stage), job.experts_on(stage)
    tied = first and last and job.model.tied_embeddings and not shape.keeps_gradient_blocks
    chunks = chunks_in_flight(job, stage) if job.model.captured else 0
    buffers = moments.global_buffer_bytes(shape) + moments.kept_blocks_bytes(shape) + userbuffers_bytes(job, shape)
    buffers += graph_buffers_bytes(job, shape, stage, chunks)
    if last and shape.keeps_gradient_blocks:
        buffers += ends.head_block_bytes(shape)
    masks_bytes = embedding_bytes(shape) + beyond_fp8_bytes(shape, shape.model.first_in_bf16)
    running = {"messages": _messages(job, shape), "embedding": microbatches_in_flight(job, stage) * masks_bytes if first else 0}
    head = head_bytes(shape) + beyond_fp8_bytes(shape, shape.model.last_in_bf16) if last else 0
    in_hand = moments.layer_in_hand_bytes(shape) if layer_whole else moments.half_in_hand_bytes(shape)
    if experts:
        in_hand += dispatched_bytes(shape)
        if job.model.moe_overlapped:  # the other pass of a pair: one layer, saving everything, and its tokens in flight
            in_hand += kept_bytes(shape, shape.model.kind_sections(experts=True)) + dispatched_bytes(shape)
    embedding_gradient = max(ends.embedding_gradient_bytes(shape), 2 * tied * ends.head_block_bytes(shape)) if first else 0
    backward = {"in_hand": in_hand + (ends.head_block_bytes(shape) if tied else 0)}
    embedded = {"in_hand": embedding_gradient + (remembered := experts * remembered_bytes(shape) if experts else 0)}
    at_head = _at_head(job, shape, running | {"head": head + ends.predicting_bytes(shape)}, tied) if last else {}
    if first and last and (overlapped or job.model.moe_overlapped):  # the previous micro-batch's embedding, beside the loss
        after = {**at_head["loss"], "logits": ends.loss_kept_bytes(shape), **embedded}
        at_head["loss"] = max(at_head["loss"], after, key=lambda sizes: sum(sizes.values()))
    beside: dict[Moment, Mapping[str, int]] = {
        "forward": running | {"head": head // 2},  # the final norm's is the layers' output
        **at_head,
        "backward": running | backward,
        **({"embedding_backward": running | embedded} if embedding_gradient else {}),
    }
    for moment, sizes in states.beside.items():
        made = moment == "optimizer_made"
        beside[moment] = sizes if made else {**sizes, "in_hand": sizes["in_hand"] + remembered}
    return replace(
        states,
        states=replace(states.states, rest=REST_BYTES[job.cluster.device], buffers=buffers, learned=job.learned.beside(stage)),
        beside=beside,
        running=running,
        pool=(pool := pool_bytes(job, shape, stage)),
        pools=chunks * pool,
        flushed=job.schedule == "flush" or microbatches_in_flight(job, stage) == 1,
    )


def activations_in_flight(job: Job, stage: int, sizes: Sequence[int], more: int = 0) -> dict[str, Any]:
    """Return the activation fields of `Parts`. `sizes`: bytes per micro-batch in each chunk. `more`: bytes besides all
    micro-batches."""
    if len(set(sizes)) == 1:
        return {"activations": most_in_flight_bytes(job, stage, sizes) + more, "chunk": sizes[0]}
    peaks = [most_in_flight_bytes(job, stage, sizes, chunk) + more for chunk in range(job.chunks)]
    later = {"activations_at_loss": peaks[-1], "activations_behind_backward": peaks[0] - sizes[0]}
    return {"activations": max(peaks), "chunk": max(sizes), **later}


def _at_head(job: Job, shape: LayerShape, running: Mapping[str, int], tied: bool) -> dict[Moment, Mapping[str, int]]:
    """Return the bytes live besides states and layers at the loss, and in the output projection's backward."""
    pieces, in_place = job.head_pieces, shape.device == "cuda" and job.overlap.weight_gradients != "none"
    logits, gradient = ends.logits_at_loss_bytes(shape, pieces), ends.logits_gradient_bytes(shape, pieces)
    in_hand = ends.head_in_hand_bytes(shape, tied, pieces, in_place=in_place)
    if job.model.mtp:  # the largest of the head's, an MTP layer's and its embedding's
        in_hand = max(in_hand, moments.layer_in_hand_bytes(shape), ends.embedding_gradient_bytes(shape))
    losses, loss_in_hand = job.model.mtp * ends.loss_kept_bytes(shape), ends.loss_in_hand_bytes(shape, pieces, in_place=in_place)
    return {
        "loss": {**running, "logits": logits + losses, "in_hand": loss_in_hand},
        "head_backward": {**running, "logits": gradient + losses, "in_hand": in_hand},
    }


def _states(job: Job, stage: int) -> Parts:
    counted = parameters.stage_parameters(job, stage)
    held = counted.total + parameters.filled_numbers(job, stage, counted) + muon.filled_numbers(job, stage)
    weights = parameters.parameter_bytes(job, held, sum(parameters.held_in_fp8(job, counted)))
    weights, gradients = weights + counted.frozen * job.model.element_bytes, parameters.gradient_bytes(job, held)
    without_flushes = job.schedule == "double_buffered"
    states = StageMemory(
        parameters=weights,
        gradients=gradients,
        optimizer=parameters.optimizer_bytes(job, counted.total, counted.experts) - muon.spared_bytes(job, stage),
        fp8_weights=parameters.fp8_copies_bytes(job, stage),
        second_weights=weights if without_flushes else 0,
        second_gradients=gradients if without_flushes and job.defer_updates and stage > 0 else 0,
    )
    # With sequence parallelism gradients of norms and row-parallel biases are copied into one block, reduced over tensor-parallel
    # ranks, and copied back (`_allreduce_non_tensor_model_parallel_grads`). Column-parallel biases are counted, too.
    reduced = counted.vectors * parameters.bytes_each(job).gradient if job.parallel.sequence_parallel else 0
    update = {
        "update_copies": parameters.update_copies_bytes(job, counted),
        "in_hand": parameters.update_in_hand_bytes(job, counted) + muon.in_hand_bytes(job, stage),
    }
    beside: dict[Moment, Mapping[str, int]] = {"reduction": {"in_hand": reduced}, "first_update": update, "update": update}
    if made := made_bytes(job, counted):
        beside["optimizer_made"] = {"update_copies": made}
    return Parts(states, beside)


def _messages(job: Job, shape: LayerShape) -> int:
    if job.parallel.pipeline == 1:
        return 0
    return (4 if job.chunks > 1 else 2) * shape.input_bytes


def without_overlap(job: Job) -> Job:
    experts = job.model.experts
    if experts is None or not experts.overlapped:
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"experts": experts.one_after_the_other})})


def dispatched_bytes(shape: LayerShape) -> int:
    """Return the tokens sent and received while a half of experts runs."""
    rows, gathered = routed_rows(as_held(shape)), shape.model.moe_dispatcher == "allgather"
    return (rows + (gathered_tokens(shape) if gathered else rows)) * shape.model.routed_hidden * shape.model.element_bytes


OUTPUTS_OF_ROUTER = 3


def graph_buffers_bytes(job: Job, shape: LayerShape, stage: int, chunks: int) -> int:
    """Return masks, workspace and static gradients of a stage's graphs. `chunks`: in flight."""
    if not job.model.captured:
        return 0
    sections = {section for kind in job.kinds_on(stage) for section in kind}
    captured = [section for section in sections if section.captured]
    outputs = max((OUTPUTS_OF_ROUTER if section.apart else 1 for section in sections if _in_graph(job, section)), default=0)
    working = max((moments.transient_bytes(shape, section) for section in captured), default=0)
    masks = chunks * max(len(job.layers_of(stage, chunk)) for chunk in range(job.chunks)) + 1
    masked = any(section.half == ATTENTION.half for section in captured)
    return outputs * shape.input_bytes + working + (masks * mask_bytes(shape) if masked else 0)


def mask_bytes(shape: LayerShape) -> int:
    return shape.micro * shape.model.seq // shape.parallel.context * shape.model.seq


def pool_bytes(job: Job, shape: LayerShape, stage: int) -> int:
    """Return the tensors of one micro-batch saved by the graphs of a stage's largest chunk."""
    if not job.model.captured:
        return 0
    of_chunk = (job.kinds_of(stage, chunk).items() for chunk in range(job.chunks))
    return max(sum(count * sum(_kept(job, shape, section) for section in kind) for kind, count in kinds) for kinds in of_chunk)


def _kept(job: Job, shape: LayerShape, section: Section) -> int:
    if section.captured:
        return half_kept_bytes(shape, section)
    if not _in_graph(job, section):
        return 0
    graph_items = set(section.apart) - {section.residual}
    tensors = planning_of(section).tensors(shape)
    return shape.input_bytes + sum(
        tensor.bytes for tensor in tensors if tensor.saved_by and graph_items.issuperset(tensor.saved_by)
    )


def _in_graph(job: Job, section: Section) -> bool:
    return section.captured or (section.exchanges and ROUTER in job.model.captured and section.half == HALVES[-1])
