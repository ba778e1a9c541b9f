"""Whether a plan fits the live run: every way in which it does not, at once.

    live facts   <── model config, parallel_state, the modules themselves          plan facts   <── plan.yaml
                              └────────────── compared here, before anything is changed ──────────────┘

Two kinds of answers. *Mismatch*: plan and run are both sound, but not for each other. *Refused* (rules R6, R14): the run uses
something that the hooks cannot hold on to, or that works against the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from megatron_lynx.apply.site import LAYOUTS
from megatron_lynx.errors import Problem
from megatron_lynx.plan.order import PHASES, Phase, frames_of, window_of
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.schedule.windows import RECV_BACKWARD


@dataclass(frozen=True)
class LiveRun:
    """One rank of a run, as Megatron built it."""

    chunks: tuple[Module, ...]
    """The GPTModels, unwrapped: one, or the virtual stages of an interleaved schedule in their order."""
    wrappers: tuple[Module, ...]
    """What they were wrapped in, outermost first."""
    config: Any
    tensor: int
    pipeline: int
    stage: int
    context: int
    tensor_group: Any

    @property
    def layers(self) -> dict[int, Module]:
        """The rank's transformer layers by Megatron's layer number, chunk by chunk."""
        return {layer.layer_number: layer for chunk in self.chunks for layer in chunk.decoder.layers}  # type: ignore[union-attr]

    @property
    def engine(self) -> bool:
        """Whether the rank's layers are Transformer Engine's. As the first one is, or else `refusals` says so."""
        first = next(iter(self.layers.values()), None)
        return first is not None and _name_of(first.self_attention.linear_qkv).startswith(ENGINE)  # type: ignore[union-attr, arg-type]

    @property
    def group_size(self) -> int:
        """Micro-batches that one chunk takes before the next one has its turn."""
        return int(self.config.microbatch_group_size_per_vp_stage or self.pipeline)

    @property
    def overlaps_exchanges(self) -> bool:
        """Whether messages between stages are waited for later than they are issued. Only interleaved schedules can."""
        return len(self.chunks) > 1 and bool(self.config.overlap_p2p_comm)


def live_run(model: Any) -> LiveRun | list[Problem]:
    """The run that `model` (a module, or Megatron's list of chunks) is part of, or why it cannot be read."""
    unwrapped = [_unwrapped(chunk) for chunk in (model if isinstance(model, (list, tuple)) else [model])]
    chunks = tuple(chunk for _, chunk in unwrapped)
    for chunk in chunks:
        if getattr(getattr(chunk, "decoder", None), "layers", None) is None:
            return [Problem("model", f"{type(chunk).__name__} without decoder.layers", "a megatron-core GPTModel")]
    if len({id(chunk) for chunk in chunks}) < len(chunks) or not chunks:
        return [Problem("model", f"{len(chunks)} chunks, not all different", "the list of chunks as Megatron built it")]

    from megatron.core import parallel_state

    return LiveRun(
        chunks=chunks,
        wrappers=tuple(wrapper for wrappers, _ in unwrapped for wrapper in wrappers),
        config=chunks[0].config,
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        context=parallel_state.get_context_parallel_world_size(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
    )


def _unwrapped(model: Module) -> tuple[tuple[Module, ...], Module]:
    wrappers = []
    while not hasattr(model, "decoder") and isinstance(getattr(model, "module", None), Module):
        wrappers.append(model)
        model = model.module  # type: ignore[assignment]
    return tuple(wrappers), model


def mismatches(plan: Plan, run: LiveRun, overlapping: bool = False) -> list[Problem]:
    """Every way in which the plan was made for something else. `overlapping`: the run does not flush."""
    problems = [*_schedule(plan, overlapping), *_layout(plan, run), *_model(plan, run)]
    if not plan.chunks_of(run.stage):
        problems.append(Problem("plan: stages", f"no stage {run.stage}", f"one for each of {run.pipeline} pipeline ranks"))
    elif plan.parallel.chunks == len(run.chunks):
        problems += _layers(plan, run)
    return problems


def _schedule(plan: Plan, overlapping: bool) -> Iterator[Problem]:
    needed = "double_buffered" if overlapping else "flush"
    if plan.schedule != needed:
        yield Problem("plan: schedule", plan.schedule, f"{needed}, as this run has it", "make a plan for this schedule")


def _layout(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    found, live = plan.parallel, {"tensor": run.tensor, "pipeline": run.pipeline, "chunks": len(run.chunks)}
    live["sequence_parallel"] = bool(run.config.sequence_parallel and run.tensor > 1)
    planned = {name: getattr(found, name) for name in live}
    if found.chunks == len(run.chunks) > 1 and found.pipeline == run.pipeline:
        planned["microbatch_group"], live["microbatch_group"] = found.group, run.group_size
    for name, needed in live.items():
        if planned[name] != needed:
            place, stated = f"plan: parallel.{name}", str(planned[name])
            yield Problem(place, stated, f"{needed}, as this run has it", "make a plan for this layout")


def _model(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    config = run.config
    live = {
        "layers": config.num_layers,
        "hidden": config.hidden_size,
        "ffn": config.ffn_hidden_size,
        "heads": config.num_attention_heads,
        "kv_groups": config.num_query_groups,
        **({"implementation": "transformer_engine" if run.engine else "local"} if run.layers else {}),
    }
    for name, needed in live.items():
        if getattr(plan.model, name) != needed:
            found = getattr(plan.model, name)
            yield Problem(f"plan: model.{name}", str(found), f"{needed}, as this run has it", "make a plan for this model")


def _layers(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    for entry, chunk in zip(plan.chunks_of(run.stage), run.chunks, strict=True):
        live = [layer.layer_number for layer in chunk.decoder.layers]  # type: ignore[union-attr]
        if list(entry.layers) != live:
            span, at = f"{live[0]}-{live[-1]}" if live else "none", entry.chunk * plan.parallel.pipeline + entry.stage
            todo = "launch with the plan's layout, or make a plan for this one"
            yield Problem(f"plan: stages.{at}.layers", str(entry.layers), f"{span}, as this rank has them", todo)


def refusals(plan: Plan, run: LiveRun, overlapping: bool = False) -> list[Problem]:
    """Everything about the run that the hooks cannot work with."""
    return [
        *(_whole_micro_batches(plan, run) if overlapping else ()),
        *_stock_recomputation(run),
        *_features(run),
        *_early_gradients(plan, run),
        *_messages_beside_copies(plan, run),
        *_wrappers(run),
        *_layer_classes(run),
        *(_engine_features(run) if run.engine else ()),
        *_random(run),
    ]


def _whole_micro_batches(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """They are counted in each step, and steps overlap."""
    for entry in plan.chunks_of(run.stage):
        if entry.whole:
            yield Problem(f"plan: stages.{entry.stage}.whole", str(entry.whole), "none without flushes", "plan without them")


def _stock_recomputation(run: LiveRun) -> Iterator[Problem]:
    """Two deciders would record the same tensors twice."""
    granularity = getattr(run.config, "recompute_granularity", None)
    if granularity:
        todo = "drop --recompute-granularity (and -method, -num-layers, -modules): the plan decides what is recomputed"
        yield Problem("--recompute-granularity", str(granularity), "none under a plan", todo)


_FEATURES = {
    "cpu_offloading": "--cpu-offloading: the plan decides what is offloaded",
    "fine_grained_activation_offloading": "--fine-grained-activation-offloading: the plan decides what is offloaded",
    "tp_comm_overlap": "--tp-comm-overlap: userbuffers remove the windows",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm: that schedule bypasses the layer's halves",
    "delay_wgrad_compute": "--delay-wgrad-compute: weight gradients would be computed after their frame is gone",
    "enable_cuda_graph": "--enable-cuda-graph: graphs bypass every hook",
    "external_cuda_graph": "--external-cuda-graph: graphs bypass every hook",
    "num_moe_experts": "experts: mixture-of-experts layers are not planned yet",
    "multi_latent_attention": "--multi-latent-attention: its projections are not sites",
    "mtp_num_layers": "--mtp-num-layers: multi-token prediction has layers outside decoder.layers",
    "heterogeneous_block_specs": "--heterogeneous-layers-config-path: layers differ in kind",
    "num_microbatches_with_partial_activation_checkpoints": "that setting: the plan decides what is recomputed",
    "distribute_saved_activations": "--distribute-saved-activations: it needs stock recomputation",
    "use_ring_exchange_p2p": "--use-ring-exchange-p2p: it returns no Work to wait for",
    "fp8": "--fp8-format: that a replay leaves amax histories and scales as they were has not been shown",
    "fp4": "--fp4-format: that a replay leaves amax histories and scales as they were has not been shown",
    "inference_fuse_tp_communication": "--inference-fuse-tp-communication",
    "fused_residual_rmsnorm": "--fused-residual-rmsnorm: its norm hands on two tensors",
    "use_transformer_engine_op_fuser": "--use-transformer-engine-op-fuser: the MLP's linears are not called one by one",
    "use_grouped_gemm_for_dense_mlp": "--use-grouped-gemm-for-dense-mlp: the MLP's linears are not called one by one",
    "experimental_attention_variant": "--experimental-attention-variant: its projections are not sites",
}
"""Config fields that must be off, and what to drop."""


_ONE = {
    "mlp_chunks_for_training": "--mlp-chunks-for-training: each of the MLP's sites would be called several times",
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards: weights are gathered by collectives of their own",
}
"""Config fields that must be 1 where a release has them, and what to drop."""


def _features(run: LiveRun) -> Iterator[Problem]:
    for name, drop in _FEATURES.items():
        value = getattr(run.config, name, None)
        if value:
            yield Problem(f"config.{name}", str(value), "off under a plan", f"drop {drop}")
    for name, drop in _ONE.items():
        value = getattr(run.config, name, 1)
        if value != 1:
            yield Problem(f"config.{name}", str(value), "1 under a plan", f"drop {drop}")
    graphs = getattr(run.config, "cuda_graph_impl", "none")
    if graphs not in (None, "none"):
        yield Problem(
            "config.cuda_graph_impl", str(graphs), "none under a plan", "drop --cuda-graph-impl: graphs bypass every hook"
        )
    if run.context > 1:
        yield Problem("context parallel size", str(run.context), "1", "its attention holds collectives; run without it")


def _early_gradients(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """In groups larger than the pipeline, gradients reach the last stage several backwards too early, and lie there. Only what is
    waited for right before each backward is a window then."""
    if run.stage != run.pipeline - 1 or run.group_size <= run.pipeline or len(run.chunks) == 1:
        return
    overlaps = run.overlaps_exchanges
    phases: tuple[Phase, ...] = (
        () if overlaps and run.config.overlap_p2p_comm_warmup_flush else ("cooldown",) if overlaps else PHASES
    )
    entries = [entry for entry in plan.chunks_of(run.stage) if any(_receives(entry, phase) for phase in phases)]
    for entry in entries:
        at = entry.chunk * plan.parallel.pipeline + entry.stage
        found = f"{RECV_BACKWARD} ({', '.join(phases)}) in groups of {run.group_size} micro-batches"
        needed = f"another window, or groups of {run.pipeline}, the number of stages"
        todo = "drop --microbatch-group-size-per-virtual-pipeline-stage, or set --overlap-p2p-communication-warmup-flush"
        yield Problem(f"plan: stages.{at}.windows", found, needed, todo)


def _messages_beside_copies(plan: Plan, run: LiveRun) -> Iterator[Problem]:
    """A copy that waited for messages which are issued ahead of time could wait for one that needs what this stage sends next."""
    if not run.overlaps_exchanges:
        return
    for entry in plan.chunks_of(run.stage):
        if entry.offload is not None and entry.offload.beside_messages == "avoid":
            at = entry.chunk * plan.parallel.pipeline + entry.stage
            needed = "allow: with overlapped exchanges there is always a message under way"
            todo = "launch with --no-overlap-p2p-communication, or change the plan"
            yield Problem(f"plan: stages.{at}.offload.beside_messages", "avoid", needed, todo)


def _receives(entry: Stage, phase: Phase) -> bool:
    return any(window_of(entry, frame, phase) == RECV_BACKWARD for frame in frames_of(entry))


def _wrappers(run: LiveRun) -> Iterator[Problem]:
    for wrapper in run.wrappers:
        if "FullyShardedDataParallel" in type(wrapper).__name__:
            todo = "use Megatron's DistributedDataParallel; with FSDP parameters do not exist between their uses"
            yield Problem("model wrapper", type(wrapper).__name__, "no FSDP", todo)


ENGINE = "megatron.core.extensions.transformer_engine."
_LAYER_CLASS = "megatron.core.transformer.transformer_layer.TransformerLayer"
_LOCAL_CLASSES = {
    "linear_qkv": "megatron.core.tensor_parallel.layers.ColumnParallelLinear",
    "linear_proj": "megatron.core.tensor_parallel.layers.RowParallelLinear",
    "linear_fc1": "megatron.core.tensor_parallel.layers.ColumnParallelLinear",
    "linear_fc2": "megatron.core.tensor_parallel.layers.RowParallelLinear",
}
_ENGINE_CLASSES = {
    "input_layernorm": "megatron.core.transformer.identity_op.IdentityOp",
    "linear_qkv": f"{ENGINE}TELayerNormColumnParallelLinear",
    "core_attention": f"{ENGINE}TEDotProductAttention",
    "linear_proj": f"{ENGINE}TERowParallelLinear",
    "pre_mlp_layernorm": "megatron.core.transformer.identity_op.IdentityOp",
    "linear_fc1": f"{ENGINE}TELayerNormColumnParallelLinear",
    "linear_fc2": f"{ENGINE}TERowParallelLinear",
}


def _layer_classes(run: LiveRun) -> Iterator[Problem]:
    classes = _ENGINE_CLASSES if run.engine else _LOCAL_CLASSES
    for number, layer in run.layers.items():
        if _name_of(layer) != _LAYER_CLASS:
            yield Problem(
                f"layer {number}", _name_of(layer), _LAYER_CLASS, "mixture-of-experts and hybrid layers are not planned yet"
            )
            continue
        for layout in LAYOUTS.values():
            for site, module in layout.modules_of(layer).items():
                needed = classes.get(site, _name_of(module))
                if _name_of(module) != needed:
                    todo = "launch with --transformer-impl local, or with transformer_engine and its usual layers"
                    yield Problem(f"layer {number}.{site}", _name_of(module), needed, todo)


_ENGINE_FEATURES = {
    "qk_layernorm": "--qk-layernorm: norms of Transformer Engine outside its linears are not held",
    "use_te_activation_func": "--use-te-activation-func: Transformer Engine's activations are not held",
    "symmetric_ar_type": "--symmetric-ar-type: that reduction is no window",
    "enable_autocast": "--enable-autocast: weights would be cast anew in every replay",
    "qk_clip": "--qk-clip: it reads the attention's largest score after each call",
    "log_max_attention_logit": "--log-max-attention-logit: it reads the attention's largest score after each call",
    "quant_recipe": "--te-precision-config-file: quantized linears are not held",
}
"""Config fields that must be off with Transformer Engine's layers, and what to drop."""

_ENGINE_FLAGS = (
    "ub_overlap_ag_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_rs_fprop",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
    "return_layernorm_output",
    "primary_weights_in_fp8",
    "fsdp_group",
)
"""Attributes of its linears that must be off: userbuffers remove the windows; the others hand on or hold what no item names."""


def _engine_features(run: LiveRun) -> Iterator[Problem]:
    for name, drop in _ENGINE_FEATURES.items():
        value = getattr(run.config, name, None)
        if value:
            yield Problem(f"config.{name}", str(value), "off under a plan with Transformer Engine", f"drop {drop}")
    for number, layer in run.layers.items():
        linears = (
            (site, module)
            for layout in LAYOUTS.values()
            for site, module in layout.modules_of(layer).items()
            if site.startswith("linear_")
        )
        for site, module in linears:
            for flag in _ENGINE_FLAGS:
                if getattr(module, flag, None):
                    yield Problem(f"layer {number}.{site}.{flag}", str(getattr(module, flag)), "off under a plan")
        break  # built from one config, as its classes say


def _random(run: LiveRun) -> Iterator[Problem]:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker, get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    if type(tracker) is not CudaRNGStatesTracker or tracker.use_cudagraphable_rng:
        found = f"{type(tracker).__name__}, graphable: {getattr(tracker, 'use_cudagraphable_rng', '?')}"
        todo = "drop --te-rng-tracker and CUDA-graph settings"
        yield Problem("random-number tracker", found, "CudaRNGStatesTracker, not graphable", todo)
    for number, layer in run.layers.items():
        held = getattr(layer.self_attention.core_attention, "rng_states_tracker", None)  # type: ignore[union-attr]
        if held not in (None, tracker):
            todo = "seed before the model is built, or without force_reset_rng"
            yield Problem(f"layer {number}.core_attention", "a random-number tracker of its own", "Megatron's present one", todo)
            break


def _name_of(module: Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
