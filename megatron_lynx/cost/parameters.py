"""How many parameters a rank holds, by what they belong to, and the bytes that each brings with it.

                                   weight   gradient   optimizer
    fp32                              4         4       8    two moments
    bf16, gradients in fp32           2         4      12    main parameter, two moments
    bf16, gradients in bf16           2         2      12    the same; and in updates 4 for the gradient in fp32
    precision-aware                   2    4 or 2      10    the half of the main parameter that a bf16 weight lacks, two moments;
                                                             less where these are held in less
on the host, wholly or in part    2    4 or 2      12 where it stays, and 4 more for gradients in 16 bits (`cost.host_optimizer`)
With the distributed optimizer the last column is shared by all ranks that hold the same parameters: context x data parallel.
fp16 weights are counted as bf16 ones. Their loss scale is one number.

Where it comes from: `validate_args` (bf16 means gradients in fp32 unless --grad-reduce-in-bf16 or --main-grads-dtype says so;
fp16 means fp16 unless --accumulate-allreduce-grads-in-fp32), `DistributedOptimizer._copy_model_grads_to_main_grads` (the copy in
fp32, none if precision-aware), Transformer Engine's `FusedAdam` (`store_param_remainders`). The first three rows are the table in
Megatron's documentation of the distributed optimizer, but that it counts the copy of the gradient as if it were held all the
time: `zero_grad` frees it before the next forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megatron_lynx.config.job import Job
from megatron_lynx.config.model import Model
from megatron_lynx.cost.expert_parameters import beside_experts, expert_sharers, own_expert_parameters
from megatron_lynx.latent_sizes import LatentSizes
from megatron_lynx.profiler.quantized import weight_bytes

TYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "remainder": 2}
FP32_BYTES, MOMENTS_BYTES = 4, 8
"""Of one number; and both moments of Adam in fp32."""


@dataclass(frozen=True)
class BytesEach:
    """What one parameter brings with it."""

    weight: int
    gradient: int
    main_parameter: int
    moments: int
    """Both moments of Adam."""
    gradient_copy: int
    """The copy in fp32 that is made for the update."""
    state_copies: int = 0
    """Copies in fp32 of what is held in less, made for the update."""
    lasting_copy: int = 0
    """A copy of the gradient in fp32 that nobody lets go of."""
    stays: float = 1.0
    """Of a rank's share of the optimizer, what is on the device."""

    @property
    def optimizer(self) -> float:
        """On the device."""
        return self.stays * (self.main_parameter + self.moments + self.lasting_copy)

    @property
    def update_copies(self) -> int:
        """What is there in updates alone."""
        return self.gradient_copy + self.state_copies


def bytes_each(job: Job) -> BytesEach:
    asked, half = job.optimizer, job.model.dtype != "fp32"
    moments = TYPE_BYTES[asked.first_moment] + TYPE_BYTES[asked.second_moment]
    gradient = TYPE_BYTES[asked.gradients]
    main, copy, states = (4 if half else 0), (0 if gradient == 4 else 4), 0
    if asked.offloaded:
        stays = 1 - asked.offloaded
        return BytesEach(job.model.element_bytes, gradient, FP32_BYTES, MOMENTS_BYTES, 0, lasting_copy=copy, stays=stays)
    if asked.precision_aware:
        main, copy = TYPE_BYTES[asked.main_parameters], 0
        held = (asked.first_moment, asked.second_moment, asked.main_parameters)
        states = 4 * sum(each not in ("fp32", "remainder") for each in held)
    return BytesEach(job.model.element_bytes, gradient, main, moments, copy, states)


@dataclass(frozen=True)
class Parameters:
    """How many parameters one rank of one stage holds."""

    matrices: int
    """The weights of the layers' linears."""
    vectors: int
    """Biases and norms, the final norm included."""
    embedding: int
    """Word and learned position embeddings."""
    head: int
    """The output projection, where it is not the embedding itself on the same stage."""
    experts: int = 0
    """Experts, which have a data-parallel group of their own."""
    largest: int = 0
    """The largest single parameter: a linear's weight, or an embedding."""

    @property
    def others(self) -> int:
        """All parameters but those of experts."""
        return self.matrices + self.vectors + self.embedding + self.head

    @property
    def total(self) -> int:
        return self.others + self.experts


def stage_parameters(job: Job, stage: int) -> Parameters:
    """A pipelined model with tied embeddings holds them on both ends, as Megatron does."""
    model, tensor, layers = job.model, job.parallel.tensor, job.layers_on(stage)
    mixtures = job.experts_on(stage)
    mlps = layers - mixtures
    first, last = stage == 0, stage == job.parallel.pipeline - 1
    words = model.vocab * model.hidden // tensor
    positions = model.seq * model.hidden if model.position == "learned" else 0
    return Parameters(
        matrices=(mlps * layer_matrices(model) + mixtures * attention_matrices(model)) // tensor
        + (layers * latent_down_matrices(model, model.latent) if model.latent is not None and model.uses_te else 0)
        + (mixtures * beside_experts(job) if mixtures else 0),
        vectors=layers * _layer_vectors(model, tensor) - mixtures * _mlp_biases(model, tensor) + last * _norm(model),
        embedding=first * (words + positions),
        head=last * (0 if first and model.tied_embeddings else words),
        experts=mixtures * own_expert_parameters(job) if mixtures else 0,
        largest=max(_largest_matrix(model) // tensor, words if first or last else 0),
    )


def _largest_matrix(model: Model) -> int:
    """The largest weight of a layer, over all tensor-parallel ranks."""
    sizes = model.latent
    if sizes is None:
        return model.hidden * max(model.fc1_width, model.qkv_width)
    queries = model.heads * sizes.query_head_size * (sizes.q_rank or model.hidden)
    return max(model.hidden * max(model.fc1_width, model.query_width), queries, model.heads * sizes.kv_head_size * sizes.kv_rank)


def layer_matrices(model: Model) -> int:
    """Weights of one layer's four linears over all tensor-parallel ranks: (2 + 2g/a)h² + 3hH with SwiGLU, else 2hH."""
    return attention_matrices(model) + model.hidden * (model.fc1_width + model.ffn)


def attention_matrices(model: Model) -> int:
    """Weights of the two linears around the attention; of latent attention its projections."""
    if model.latent is not None:
        return latent_matrices(model, model.latent)
    return model.hidden * (model.qkv_width + model.query_width)


def latent_matrices(model: Model, sizes: LatentSizes) -> int:
    """Weights of latent attention that are cut over tensor-parallel ranks: all but Transformer Engine's down-projections."""
    cut = model.heads * ((sizes.q_rank or model.hidden) * sizes.query_head_size + sizes.kv_rank * sizes.kv_head_size)
    whole = 0 if model.uses_te else latent_down_matrices(model, sizes)
    return cut + whole + model.query_width * model.hidden


def latent_down_matrices(model: Model, sizes: LatentSizes) -> int:
    """Weights of the down-projections."""
    return model.hidden * ((sizes.q_rank or 0) + sizes.kv_down_width)


def fp8_copies_bytes(job: Job, stage: int) -> int:
    """Copies in FP8 that the linears of a stage's layers hold of their weights, made anew in each step's first micro-batch."""
    model, tensor, recipe = job.model, job.parallel.tensor, job.model.fp8_recipe
    if recipe is None:
        return 0
    rows_and_columns = (
        (model.qkv_width // tensor, model.hidden),
        (model.hidden, model.query_width // tensor),
        (model.fc1_width // tensor, model.hidden),
        (model.hidden, model.ffn // tensor),
    )
    return job.layers_on(stage) * sum(
        weight_bytes(recipe, *size, transposes=job.cluster.transposes_fp8) for size in rows_and_columns
    )


def parameter_bytes(job: Job, count: int) -> int:
    return count * bytes_each(job).weight


def gradient_bytes(job: Job, count: int) -> int:
    return count * bytes_each(job).gradient


def optimizer_bytes(job: Job, count: int, experts: int = 0) -> int:
    """This rank's share, rounded up. `experts`: of the parameters, those of experts."""
    return _shared(job, count, experts, bytes_each(job).optimizer)


def update_copies_bytes(job: Job, count: int, experts: int = 0) -> int:
    """What this rank's share of an update copies into fp32."""
    return _shared(job, count, experts, bytes_each(job).update_copies)


def reduced_bytes(job: Job, parameters: Parameters) -> int:
    """Gradients of norms and row-parallel biases, of which with sequence parallelism every tensor-parallel rank has a part.

    They are copied into one block, reduced, and copied back (`_allreduce_non_tensor_model_parallel_grads`). Biases of
    column-parallel linears, which are not among them, are counted, too: few bytes at a moment that never binds.
    """
    together = job.parallel.sequence_parallel and job.parallel.tensor > 1
    return parameters.vectors * bytes_each(job).gradient if together else 0


def update_in_hand_bytes(job: Job, parameters: Parameters) -> int:
    """What an update needs beside states and copies, at most.

    Fused optimizers step in place. Copies to the host and back convert on the device, one parameter at a time. PyTorch's AdamW on
    a CPU has the root of one parameter's second moment in fp32, twice, and that of the parameter before.
    """
    if job.cluster.device != "cpu":
        ways = 0 if not job.optimizer.offloaded else 1 + (job.optimizer.gradients != "fp32")  # back, and out
        return ways * FP32_BYTES * min(parameters.largest, owned_parameters(job, parameters))
    return 3 * 4 * min(parameters.largest, _shared(job, parameters.total, parameters.experts, 1))


def owned_parameters(job: Job, parameters: Parameters) -> int:
    """How many parameters a rank steps, rounded up."""
    return _shared(job, parameters.total, parameters.experts, 1)


def _shared(job: Job, count: int, experts: int, each: float) -> int:
    sharded = job.parallel.distributed_optimizer
    sharers = job.parallel.context * job.replicas if sharded else 1
    of_experts = 0
    if experts:
        of_experts = ceil(experts * each / (expert_sharers(job) if sharded else 1))
    return ceil((count - experts) * each / sharers) + of_experts


def _mlp_biases(model: Model, tensor: int) -> int:
    """The biases that a layer without experts has, and a layer with experts has not."""
    return model.hidden + model.fc1_width // tensor if model.bias else 0


def _layer_vectors(model: Model, tensor: int) -> int:
    if model.latent is not None:
        inner = (model.latent.q_rank or 0) + model.latent.kv_rank if model.qk_norm else 0
        biases = 2 * model.hidden + model.fc1_width // tensor if model.bias else 0  # projections of latent attention have none
        return 2 * _norm(model) + (_norm(model, inner) if inner else 0) + biases
    row_parallel, column_parallel = 2 * model.hidden, (model.qkv_width + model.fc1_width) // tensor
    heads = 2 * _norm(model, model.head_size) if model.qk_norm else 0  # one norm for all queries, one for all keys
    return 2 * _norm(model) + heads + (row_parallel + column_parallel if model.bias else 0)


def _norm(model: Model, width: int | None = None) -> int:
    """Parameters of one norm, of what is `width` wide: the residual stream where nothing is given."""
    return (width or model.hidden) * (2 if model.norm == "layernorm" else 1)
