"""Checks that a job's model, layout and GPUs are compatible, before Megatron or Transformer Engine would fail."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megatron_lynx.config.cluster import Cluster
from megatron_lynx.config.experts import Experts, first_beyond
from megatron_lynx.config.model import Model
from megatron_lynx.config.parallel import Optimizer, Parallel
from megatron_lynx.fp8_recipes import STORED


def size_problems(model: Model, parallel: Parallel) -> Iterator[str]:
    tensor, context, sequence_parallel = parallel.tensor, parallel.context, parallel.sequence_parallel
    divide = f"parallel.tensor ({tensor}), such as {_divisors(gcd(model.heads, model.ffn, model.kv_groups))}"
    slices, traded = 2 * context * (tensor if sequence_parallel else 1), tensor * parallel.context_groups[0]
    rules = [(name, tensor, divide) for name in ("heads", "ffn", "kv_groups")]
    rules += [("seq", tensor, f"parallel.tensor ({tensor}) under sequence parallelism")] if sequence_parallel else []
    rules += [("seq", slices, f"{slices}: two slices for each context rank")] if context > 1 else []
    if traded > tensor:
        rules += [(name, traded, f"parallel.tensor x ranks that trade heads ({traded})") for name in ("heads", "kv_groups")]
    for name, divisor, needed in rules:
        if (value := getattr(model, name)) % divisor:
            yield f"model.{name} ({value}) must be a multiple of {needed}"


def layer_problems(layers: int, parallel: Parallel) -> Iterator[str]:
    partition, pipeline = parallel.partition, parallel.pipeline
    if isinstance(partition, tuple):
        if sum(partition) != layers:
            yield f"parallel.partition {list(partition)} has {sum(partition)} layers, but model.layers is {layers}"
    elif partition == "auto" and parallel.layers_per_chunk is None:
        if layers < pipeline:
            yield f"model.layers ({layers}) must be at least parallel.pipeline ({pipeline})"
    elif layers % pipeline:
        yield f"model.layers ({layers}) must be a multiple of parallel.pipeline ({pipeline}), such as {_divisors(layers)}"
    elif (stage_layers := layers // pipeline) % (chunk := parallel.layers_per_chunk or stage_layers):
        needed = f"parallel.layers_per_chunk ({chunk}), such as {_divisors(stage_layers)}"
        yield f"layers of a stage ({stage_layers}) must be a multiple of {needed}"


def expert_problems(model: Model, parallel: Parallel, gpus: int) -> Iterator[str]:
    """Rules of `parallel_state.initialize_model_parallel`, `TransformerConfig.__post_init__` and `MoELayer.forward`."""
    experts = model.experts
    if experts is None:
        asked = [name for name in ("expert", "expert_tensor") if getattr(parallel, name) not in (1, None)]
        yield from (f"parallel.{name} ({getattr(parallel, name)}) needs model.experts, found none" for name in asked)
        return
    yield from _undivided(model, experts, parallel)
    if experts.filled and model.fp8 is None:
        yield "model.experts.filled needs model.fp8, found none: rows are filled up for FP8 alone"
    width = parallel.expert_tensor_size * parallel.expert * parallel.pipeline
    if gpus % width:
        sizes = "parallel.expert_tensor x parallel.expert x parallel.pipeline"
        yield f"gpus ({gpus}) must be a multiple of {sizes} ({width})"
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        yield f"parallel.tensor ({parallel.tensor}) with experts needs parallel.sequence_parallel: true, found false"
    if model.bias and parallel.expert_tensor_size > 1:
        yield f"parallel.expert_tensor ({parallel.expert_tensor_size}) must be 1 for experts with biases (model.bias: true)"
    if model.bias and experts.shared_ffn:
        yield f"model.experts.shared_ffn ({experts.shared_ffn}) needs model.bias: false, found true"


def instance_problems(parallel: Parallel, gpus: int) -> Iterator[str]:
    instances = parallel.optimizer_instances
    for name, ranks in (
        ("parallel.context x replicas", gpus // (parallel.tensor * parallel.pipeline)),
        ("ranks with the same experts", gpus // (parallel.expert_tensor_size * parallel.expert * parallel.pipeline)),
    ):
        if ranks % instances:
            yield f"{name} ({ranks}) must be a multiple of parallel.optimizer_instances ({instances})"


def _undivided(model: Model, experts: Experts, parallel: Parallel) -> Iterator[str]:
    tensor = parallel.expert_tensor_size
    if experts.count % parallel.expert:
        yield f"model.experts.count ({experts.count}) must be a multiple of parallel.expert ({parallel.expert})"
    if experts.ffn % tensor:
        yield f"model.experts.ffn ({experts.ffn}) must be a multiple of parallel.expert_tensor ({tensor})"
    if experts.shared_ffn % parallel.tensor:
        yield f"model.experts.shared_ffn ({experts.shared_ffn}) must be a multiple of parallel.tensor ({parallel.tensor})"
    for name, load in (("load", experts.load), ("holds", experts.held_load)):
        if load > (most_load := experts.most_load(parallel.expert)):
            yield f"model.experts.{name} ({load:g}) must be at most {most_load:g} with parallel.expert {parallel.expert}"
            return
    if (beyond := first_beyond(experts.layers, model.layers)) is not None:
        yield f"model.experts.layers names layer {beyond}, but model.layers is {model.layers}"


def fp8_parameter_problems(model: Model, parallel: Parallel, optimizer: Optimizer) -> Iterator[str]:
    if model.fp8 is None or not model.fp8.parameters:
        return
    if not parallel.distributed_optimizer:
        yield "model.fp8.parameters needs parallel.distributed_optimizer: true, found false"
    if optimizer.offload and model.fp8.recipe != "delayed":
        yield f"model.fp8.parameters with optimizer.offload needs model.fp8.recipe delayed, found {model.fp8.recipe}"
    if model.fp8.recipe == "nvfp4":
        yield "model.fp8.parameters is true, needed false with model.fp8.recipe nvfp4: no run with weights in FP4 was tried"


def fp8_problems(model: Model, parallel: Parallel, micro: int, cluster: Cluster) -> list[str]:
    """Return problems of FP8; empty without FP8. The testbed's cluster has no figures and emulates a Hopper."""
    if model.fp8 is None:
        return []
    return [*_unfit(model, parallel, micro), *_unable(model.fp8.recipe, cluster), *_in_bf16(model, parallel)]


def _in_bf16(model: Model, parallel: Parallel) -> Iterator[str]:
    assert model.fp8 is not None
    most_layers, counts = model.layers // parallel.pipeline, model.fp8.model_dump(include={"first_in_bf16", "last_in_bf16"})
    for name, layers in counts.items():
        if layers > most_layers:
            yield f"model.fp8.{name} ({layers}) must be at most model.layers / parallel.pipeline ({most_layers})"
    if any(counts.values()) and model.fp8.recipe == "delayed":
        yield "model.fp8.first_in_bf16 and last_in_bf16 need another recipe than delayed: Megatron stops here"


def _unfit(model: Model, parallel: Parallel, micro: int) -> Iterator[str]:
    assert model.fp8 is not None
    stored, tensor = STORED[model.fp8.recipe], parallel.tensor
    least_rows, least_columns = stored.multiples
    rows = model.seq // parallel.context * micro // (tensor if parallel.sequence_parallel else 1)
    sizes = {
        "rows of a micro-batch on a rank": (rows, least_rows),
        "model.hidden": (model.hidden, least_columns),
        "columns of queries on a rank": (model.query_width // tensor, least_columns),
        "model.ffn / parallel.tensor": (model.ffn // tensor, least_columns),
    }
    if model.latent is None:
        sizes["columns of linear_qkv on a rank"] = (model.qkv_width // tensor, least_rows)
    else:
        sizes["model.latent.kv_rank"] = (model.latent.kv_rank, least_columns)
        sizes["model.latent.q_rank"] = (model.latent.q_rank or 0, least_columns)
        sizes["columns of linear_kv_down_proj"] = (model.latent.kv_down_width, least_rows)
    if model.experts is not None:
        sizes["model.experts.ffn on a rank"] = (model.experts.ffn // parallel.expert_tensor_size, least_columns)
        sizes["model.experts.shared_ffn / parallel.tensor"] = (model.experts.shared_ffn // tensor, least_columns)
    if parallel.sequence_parallel:
        gathered = {"rows of a micro-batch on a rank": rows}
        gathered |= {what: size for what, (size, _) in sizes.items() if what in GATHERED}
        sizes |= {what: (size, max(stored.gathered_multiple, sizes[what][1])) for what, size in gathered.items()}
    for what, (size, needed) in sizes.items():
        if size % needed:
            yield f"{what} ({size}) must be a multiple of {needed} with model.fp8"


GATHERED = ("model.hidden", "model.latent.q_rank", "model.latent.kv_rank")


def _unable(recipe: str, cluster: Cluster) -> Iterator[str]:
    if cluster.matmul is None:
        return
    if cluster.fp8 is None:
        needed = "GPUs that have it, such as those of h100-80g, h800-80g, h200-141g"
        yield f"model.fp8 is {recipe}, but the GPUs of cluster {cluster.name} have no FP8 (cluster.fp8): needed {needed}"
    elif recipe not in cluster.fp8.taken:
        known = ", ".join(cluster.fp8.taken)
        yield f"model.fp8.recipe is {recipe}, but the GPUs of cluster {cluster.name} take {known}"


def needs_flushes(model: Model) -> list[str]:
    reasons = {
        "model.fp8: weights have copies in FP8, of one version, schedule double_buffered has two": model.fp8,
        "model.experts: routers keep state from batch to batch, schedule double_buffered has two in flight": model.experts,
        "model.mtp: its embedding is a second copy, which was not tried with schedule double_buffered": model.mtp or None,
    }
    return [reason for reason, feature in reasons.items() if feature is not None]


def _divisors(number: int) -> str:
    divisors = [str(divisor) for divisor in range(1, min(number, 1000) + 1) if number % divisor == 0]
    return ", ".join(divisors[:10])
