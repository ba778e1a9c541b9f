"""What the tests of measuring run on a rank. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.config.job import Job
from megatron_lynx.profiler.profile import BlockProfile, HalfProfile, LinkKind, LinkPoint


def measure_one(rank: int, job: Job) -> dict[Half, HalfProfile]:
    """One layer of a job's tensor-parallel shard, on a single rank without a group."""
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from megatron_lynx.apply.hooks.sites import places_of
    from megatron_lynx.profiler.measured import measure_layer, shard_arguments
    from megatron_lynx.runtime.device import device_for
    from megatron_lynx.testbed.profiling import te_layer
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import fp8_context

    model, shards = job.model, job.parallel.tensor
    alone = job.model_copy(update={"gpus": 1, "parallel": type(job.parallel)(), "model": model.model_copy(update={"layers": 1})})
    initialise(alone)
    chunk = build_model(alone, **shard_arguments(job))[0]
    layer = getattr(chunk, "module", chunk).decoder.layers[0]
    dtype = next(layer.parameters()).dtype
    arguments = {}
    if model.position == "rope" and model.latent is None:
        arguments["rotary_pos_emb"] = RotaryEmbedding(model.head_size, 1.0, use_cpu_initialization=True)(model.seq)
    hidden = torch.randn(model.seq, job.batch.micro, model.hidden, dtype=dtype)
    sequence_shards = shards if job.parallel.sequence_parallel else 1
    with fp8_context(job, layer):
        sites = {section: places_of(section, layer, te=model.uses_te) for section in model.halves.values()}
        te = te_layer(job, layer, sites)
        device = device_for(hidden.device)
        fields = {"sites": sites, "sequence_shards": sequence_shards, "repetitions": 2, "te": te}
        return measure_layer(layer, hidden, arguments, device, **fields)


def measure_experts(rank: int, job: Job, **fields: Any) -> HalfProfile:
    """Experts of a job's layer over its expert-parallel ranks. `fields`: of TransformerConfig."""
    from unittest.mock import patch

    from megatron_lynx.testbed import tiny_models
    from megatron_lynx.testbed.profiling import of_experts

    usual = tiny_models.transformer_config
    with patch.object(tiny_models, "transformer_config", lambda *args, **named: usual(*args, **{**named, **fields})):
        return of_experts(job, job.model.experts, 2)


def measure_squaring(rank: int) -> tuple[BlockProfile, dict[str, int]]:
    """Its seconds, and the bytes it is said to hold: of a tensor given to each pass, of one that each pass makes, of own rows."""
    import torch

    from megatron_lynx.profiler.measured import held_bytes
    from megatron_lynx.profiler.timing import measure_block
    from megatron_lynx.runtime.device import present_device

    tensor = torch.ones(8, requires_grad=True)
    held = {
        "given": held_bytes(lambda: tensor * tensor, width=4),
        "made": held_bytes(lambda: tensor.clone() ** 2, width=4),
        "own rows": held_bytes(lambda: tensor.clone() ** 2, width=8, sequence_shards=2),
    }
    return measure_block(lambda: tensor * tensor, present_device(), repetitions=2), held


def measure_messages(rank: int, kinds: Sequence[LinkKind], sizes: Sequence[int]) -> tuple[LinkPoint, ...]:
    import torch
    import torch.distributed as dist

    from megatron_lynx.profiler.measured import measure_links
    from tests.instruments.groups import initialise
    from tests.tiny_jobs import tiny_job

    initialise(tiny_job(tensor=2))
    return measure_links(kinds, sizes, dist.group.WORLD, torch.device("cpu"), repetitions=2)


def measure_lengthened(rank: int, longer: float) -> float:
    """Compute that takes so many times longer by the clock, in each pair of calls, the second time: during the collective."""
    from itertools import chain, cycle, repeat
    from types import SimpleNamespace
    from unittest.mock import patch

    import torch
    import torch.distributed as dist

    from megatron_lynx.profiler import measured
    from tests.instruments.groups import initialise
    from tests.tiny_jobs import tiny_job

    initialise(tiny_job(tensor=2))
    seconds = chain(repeat(1.0, measured.WARMUP + 3), cycle((1.0, longer)))
    clock = SimpleNamespace(now_s=0.0, perf_counter=lambda: clock.now_s)

    def compute() -> None:
        clock.now_s += next(seconds)

    message = LinkPoint(kind="all_reduce", bytes=1 << 16, seconds=0.25)
    with patch.object(measured, "time", clock):
        return measured.measure_interference(compute, message, dist.group.WORLD, torch.device("cpu"), repetitions=3)


def bytes_saved_by_items(
    rank: int, job: Job, favour: float = 0.0, capacity: float | None = None, **fields: Any
) -> dict[str, int]:
    """What the items of a mixture of experts save in one forward: the input, and every block that is no parameter, by the item
    that saves it first; in FP8 also `copies` of the half's weights. `favour`: added to the logits of the first rank's experts.
    `capacity`: of each expert, over a balanced share; tokens beyond are dropped. `fields`: of TransformerConfig."""
    import torch

    from megatron_lynx.runtime.saved import memory_of
    from megatron_lynx.testbed.groups import seed_random_numbers
    from megatron_lynx.testbed.tiny_models import DTYPES
    from tests.apply.te_on_ranks import copies_of_weights
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import fp8_context

    initialise(job)
    (chunk,) = build_model(job, **fields, **({} if capacity is None else {"moe_expert_capacity_factor": capacity}))
    seed_random_numbers(7)
    layer = getattr(chunk, "module", chunk).decoder.layers[0]
    rows = job.model.seq // (job.parallel.tensor if job.parallel.sequence_parallel else 1)
    router, first = layer.mlp.router, job.model.experts.count // job.parallel.expert
    gating = router.gating
    if favour:
        more = favour * (torch.arange(job.model.experts.count) < first)
        router.gating = lambda given: gating(given) + more
    hidden = torch.randn(rows, job.batch.micro, job.model.hidden, dtype=DTYPES[job.model.dtype]).requires_grad_()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
    held = {hidden.untyped_storage().data_ptr(): ("input", hidden.untyped_storage())}
    running = [""]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        for part in memory_of([tensor]):
            storage = part.untyped_storage()
            if storage.data_ptr() not in parameters:
                held.setdefault(storage.data_ptr(), (running[0], storage))
        return tensor

    _tell_items(layer, job.model.kind_sections(experts=True)[1], running)
    with fp8_context(job, layer), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer._forward_mlp(hidden)
    copies = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in copies_of_weights(layer)}
    held = {at: each for at, each in held.items() if at not in copies}
    saved: dict[str, int] = {"copies": sum(copies.values())} if copies else {}
    for item, storage in held.values():
        saved[item] = saved.get(item, 0) + storage.nbytes()
    return saved


def _tell_items(layer: Any, section: Section, running: list[str]) -> None:
    """From now on `running` says which item of the section runs."""

    def reporting(item: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            running[0] = item
            outputs = method(*args, **named)
            running[0] = section.code_behind.get(item, item)
            return outputs

        return call

    for item in section.sites:
        for module in _modules(layer, item.path.split(".")):
            for method in item.methods:
                setattr(module, method, reporting(item.name, getattr(module, method)))


def _modules(module: Any, path: Sequence[str]) -> list[Any]:
    """What is at a path of a layer; `*` stands for each of several experts."""
    if not path:
        return [module]
    if path[0] != "*":
        return _modules(getattr(module, path[0]), path[1:])
    return [found for expert in getattr(module, "local_experts", [module]) for found in _modules(expert, path[1:])]
