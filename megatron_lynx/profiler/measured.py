"""Measures one real layer on this machine, its seconds and saved memory blocks, and a job's messages between its ranks.

A block is a storage: its views count once, and keep all of it. Two passes are recorded and kept alive together; blocks common to
both (parameters, masks, rotary tables, the input) belong to neither.

The given layer is one tensor-parallel shard without a group: it has a part of the heads and of the FFN (`shard_arguments`), and
its figures contain no communication. Norms inside Transformer Engine's linears are also run alone, and their part of the tensors
that the linear's node saves is separated (`InnerNorm`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.config.job import Job
from megatron_lynx.nest import all_in
from megatron_lynx.profiler import timing
from megatron_lynx.profiler.profile import ExpertHalf, HalfProfile, ItemProfile, LinkKind, LinkPoint, SavedTensor
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.profiler.timing import HalfRun, HeadStart, InnerNorm
from megatron_lynx.timeline import seconds_between

if TYPE_CHECKING:
    from megatron_lynx.apply.hooks.sites import Place
    from megatron_lynx.runtime.device import Device


@dataclass
class _Block:
    bytes: int
    made_by: str
    saved_by: list[str] = field(default_factory=list)
    output: bool = False


def blocks_of(run: HalfRun) -> tuple[tuple[SavedTensor, ...], dict[str, int]]:
    """Return a half's saved tensors, and its items' output bytes. With experts, which may run one by one, equal tensors count
    together, and only outputs of linears count."""
    section, first, (blocks, outputs, _) = run.section, _recorded(run), _recorded(run)
    tensors = [
        SavedTensor(bytes=block.bytes, made_by=block.made_by, saved_by=tuple(block.saved_by), output=block.output)
        for address, block in blocks.items()
        if address not in first[0] and (block.saved_by or (block.output and block.made_by in section.handing_on))
    ]
    if section.exchanges:
        together: dict[Any, SavedTensor] = {}
        for one in tensors:
            size = together[key].bytes if (key := (one.made_by, one.saved_by, one.output)) in together else 0
            together[key] = one.model_copy(update={"bytes": size + one.bytes})
        tensors, outputs = list(together.values()), {name: outputs[name] for name in section.linears}
    return tuple(tensors), outputs


def held_bytes(run: Callable[[], Tensor], width: int, sequence_shards: int = 1) -> int:
    """Return the bytes that one pass of the embedding or output layer saves, without blocks common to two passes (parameters, and
    a shared input). Under sequence parallelism, blocks of tensors `width` wide are sharded: divided by `sequence_shards`."""
    (first, _kept_first), (second, _kept_second) = _saved_by(run), _saved_by(run)
    blocks = [(size, last) for address, (size, last) in second.items() if address not in first]
    return sum(size // (sequence_shards if last == width else 1) for size, last in blocks)


def _saved_by(run: Callable[[], Tensor]) -> tuple[dict[int, tuple[int, int]], list[Tensor]]:
    """Return bytes and last dimension of every saved block by address, and tensors to keep so that no address is reused."""
    blocks: dict[int, tuple[int, int]] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor.detach())
        storage = tensor.untyped_storage()
        blocks.setdefault(storage.data_ptr(), (storage.nbytes(), tensor.shape[-1] if tensor.ndim else 1))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held.append(run())
    return blocks, held


def _recorded(run: HalfRun) -> tuple[dict[int, _Block], dict[str, int], Any]:
    """Record one pass with saved-tensor hooks. Keep the third result, so that no address is reused."""
    blocks: dict[int, _Block] = {}
    outputs: dict[str, int] = {}
    held: list[Tensor] = []
    item = [timing.code_behind(run.section, None)]
    taken: list[Any] = [()]

    def seen(tensor: Tensor) -> _Block:
        held.append(tensor.detach())
        storage = tensor.untyped_storage()
        return blocks.setdefault(storage.data_ptr(), _Block(storage.nbytes(), item[0]))

    def pack(tensor: Tensor) -> Tensor:
        if not has_memory(tensor):
            return tensor
        block = seen(tensor)
        if item[0] not in block.saved_by:
            block.saved_by.append(item[0])
        return tensor.detach()

    def entered(place: Place, arguments: Any) -> None:
        for tensor in all_in(Tensor, arguments):
            seen(tensor)
        item[0], taken[0] = place.item.name, arguments

    def left(place: Place, result: Any) -> None:
        name = place.item.name
        for tensor in all_in(Tensor, result):
            block = seen(tensor)
            block.output = block.output or block.made_by == name
        if (norm := run.inner_norms.get(name)) is not None:
            _tell_apart(blocks, norm.saved(result, taken[0]), norm.item, name)
        outputs[name] = timing.nbytes_of(timing.first_of(result)) + (outputs.get(name, 0) if place.item.of_experts else 0)
        item[0] = timing.code_behind(run.section, name)

    start = run.input.detach().requires_grad_()
    blocks[start.untyped_storage().data_ptr()] = _Block(timing.nbytes_of(start), "input")
    with run.watched(entered, left), torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        result = run.forward(start, **run.arguments)
    outputs[run.section.residual] = timing.nbytes_of(timing.first_of(result))
    if run.section.column_parallel in run.inner_norms:
        outputs[run.section.norm] = timing.nbytes_of(start)
    return blocks, outputs, (held, result)


def _tell_apart(blocks: dict[int, _Block], saved: tuple[Tensor | None, ...], norm: str, linear: str) -> None:
    """Assign the norm's part of a fused linear's saved tensors: the norm made all of them, the linear reads its output, the norm
    its statistics."""
    *output, mean, deviation = saved
    for parts, reader in ((output, linear), ((mean, deviation), norm)):
        for part in parts:
            if part is not None:
                block = blocks[part.untyped_storage().data_ptr()]
                block.made_by, block.saved_by = norm, [reader]


def has_memory(tensor: Tensor) -> bool:
    """Return False for wrappers around other tensors, such as a weight's FP8 copy."""
    try:
        tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True


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
    sites: Mapping[Section, Sequence[Place]],
    sequence_shards: int = 1,
    repetitions: int = 9,
    te: TeLayer | None = None,
) -> dict[Half, HalfProfile]:
    """Measure halves of a `TransformerLayer` in training mode. `sites`: their contents, and the methods of each one's sites.
    `hidden` is the layer's input on all rows; `arguments` are the other arguments of its forward (mask, rotary tables). `device`
    is the layer's device, whose clock is used. `sequence_shards` is the tensor-parallel size under sequence parallelism: figures
    of norms, dropouts and residuals, which work on a part of the rows, are divided by it. For FP8 the caller enters its
    context."""

    runs, head_start = list[HalfRun](), timing.head_start_on(device)
    for section, places in sites.items():
        start, given = (runs[-1].output().detach(), {}) if runs else (hidden, arguments)
        norms = {} if te is None else te.norms[section.half]
        runs.append(HalfRun(section, getattr(layer, section.method), given, start, places, norms))
    return {run.section.half: _profile(run, head_start, sequence_shards, repetitions, te) for run in runs}


def _profile(run: HalfRun, head_start: HeadStart, shards: int, repetitions: int, te: TeLayer | None) -> HalfProfile:
    forward, backward = timing.item_seconds(run, head_start, repetitions)
    tensors, outputs = blocks_of(run)
    flops = timing.item_flops(run) if te is None else te.flops
    section = run.section
    gemms = {item: (backward[item] / 2, backward[item] / 2) for item in section.linears if section.of_name[item].of_experts}
    if te is not None and te.fp8:
        gemms |= {item.name: (forward[item.name], forward[item.name]) for item in section.items if item.is_linear}
    else:
        gemms |= timing.gradient_gemm_seconds(run, head_start, repetitions)

    def share(item: str) -> int:
        return shards if item in section.on_own_rows else 1

    tensors = tuple(tensor.model_copy(update={"bytes": tensor.bytes // share(tensor.made_by)}) for tensor in tensors)
    items = {
        item: ItemProfile(
            forward_s=forward.get(item, 0.0) / share(item),
            backward_s=backward.get(item, 0.0) / share(item),
            saved_bytes=sum(tensor.bytes for tensor in tensors if tensor.saved_by[:1] == (item,)),
            output_bytes=outputs.get(item, 0) // (shards if item in (*section.on_own_rows, *section.ends) else 1),
            flops=flops.get(item, 0),
            dgrad_s=gemms.get(item, (0.0, 0.0))[0],
            wgrad_s=gemms.get(item, (0.0, 0.0))[1],
        )
        for item in section.names
    }
    half = HalfProfile(input_bytes=timing.nbytes_of(run.input) // shards, items=items, tensors=tensors)
    return ExpertHalf(**dict(half), exchange_s=exchange_s(run, head_start.device, repetitions)) if section.exchanges else half


def exchange_s(run: HalfRun, device: Device, repetitions: int) -> float:
    """Return the slowest rank's seconds of one exchange of a half's rows. All ranks begin it together."""
    seconds: list[float] = []

    def entered(place: Place, _: Any) -> None:
        if timing.exchanges_rows(place):
            device.synchronize()
            dist.barrier()
            seconds.append(-time.perf_counter())

    def left(place: Place, _: Any) -> None:
        if timing.exchanges_rows(place):
            device.synchronize()
            seconds[-1] += time.perf_counter()

    with run.watched(entered, left), torch.no_grad():
        for _ in range(WARMUP + repetitions):
            run.output()
    assert dist.group.WORLD is not None, "groups are made"
    return slowest(median(seconds[2 * WARMUP :]), dist.group.WORLD, device.where)


WARMUP = 2
"""Messages before the first timed one: connections are made on first use."""


def messages_of(job: Job) -> dict[LinkKind, int]:
    parallel, whole, own = job.parallel, LayerShape.of(job).gathered_bytes, LayerShape.of(job).input_bytes
    messages: dict[LinkKind, int] = {}
    if parallel.sequence_parallel:
        messages |= {"all_gather": whole, "reduce_scatter": whole}
    elif parallel.tensor > 1:
        messages["all_reduce"] = whole
    if parallel.pipeline > 1:
        messages["p2p"] = own
    if job.cluster.device == "cuda":
        messages["host"] = own
    return messages


def measure_links(
    kinds: Iterable[LinkKind], sizes_bytes: Sequence[int], group: ProcessGroup, device: torch.device, repetitions: int = 7
) -> tuple[LinkPoint, ...]:
    """Time messages of these kinds and sizes over `group`. Every rank of the group makes the same call and gets the same result.
    Sizes are rounded down to whole fp32 elements on every rank. `p2p` goes from each rank to the next one and needs two ranks.
    `host` is a copy to host memory, of all ranks at once."""
    points = []
    for kind, size in product(kinds, sizes_bytes):
        seconds = _median_seconds(_message(kind, size, group, device), group, repetitions)
        points.append(LinkPoint(kind=kind, bytes=size, seconds=slowest(seconds, group, device)))
    return tuple(points)


def collective(kind: LinkKind, size_bytes: int, group: ProcessGroup, device: torch.device) -> Callable[[], Any]:
    ranks = dist.get_world_size(group)
    count = max(1, size_bytes // 4 // ranks)
    part, whole = torch.zeros(count, device=device), torch.zeros(count * ranks, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group, async_op=True)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
    return lambda: dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)


def _message(kind: LinkKind, size_bytes: int, group: ProcessGroup, device: torch.device) -> Callable[[], Any]:
    if kind == "host":
        here = torch.zeros(max(1, size_bytes // 4), device=device)
        there = torch.empty(here.shape, device="cpu", pin_memory=device.type == "cuda")
        return lambda: there.copy_(here, non_blocking=True)
    if kind == "p2p":
        whole = torch.zeros(max(1, size_bytes // 4), device=device)
        return lambda: _pass_on(whole, group)
    start = collective(kind, size_bytes, group, device)
    return lambda: start().wait()


def _pass_on(whole: torch.Tensor, group: ProcessGroup) -> None:
    """Even ranks send to the next one, odd ranks receive: one message on each link, one way."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    if rank % 2 == 0 and rank + 1 < ranks:
        dist.send(whole, dist.get_global_rank(group, rank + 1), group=group)
    elif rank % 2:
        dist.recv(whole, dist.get_global_rank(group, rank - 1), group=group)


def _median_seconds(send: Callable[[], Any], group: ProcessGroup, repetitions: int) -> float:
    def complete() -> None:
        send()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    seconds = []
    for _ in range(WARMUP + repetitions):
        dist.barrier(group=group)
        seconds.append(wall_seconds(complete))
    return median(seconds[WARMUP:])


def slowest(seconds: float, group: ProcessGroup, device: torch.device) -> float:
    most_s = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(most_s, op=dist.ReduceOp.MAX, group=group)
    return float(most_s.item())


OUTLASTS = 3
"""Duration of the collective, relative to the compute."""


def recompute_like(job: Job, device: torch.device) -> Callable[[], Any]:
    """Return a workload typical of recomputation: the first GEMM of one rank's MLP, and the activation of its output."""
    model = job.model
    dtype = torch.float32 if model.dtype == "fp32" else torch.bfloat16
    rows = torch.randn(model.seq * job.batch.micro, model.hidden, dtype=dtype, device=device)
    weight = torch.randn(model.hidden, model.fc1_width // job.parallel.tensor, dtype=dtype, device=device)
    return lambda: torch.nn.functional.gelu(rows @ weight)


def measure_interference(
    compute: Callable[[], Any], message: LinkPoint, group: ProcessGroup, device: torch.device, repetitions: int = 9
) -> float:
    """Return the slowdown of `compute` during a collective, at least 1. Every rank of the group makes the same call. `message`: a
    collective of this group with its time."""
    timed = stream_seconds if device.type == "cuda" else wall_seconds
    alone_s = slowest(median(timed(compute) for _ in range(WARMUP + repetitions)), group, device)
    times = max(1, math.ceil(OUTLASTS * alone_s / message.seconds)) if message.seconds else 1
    start = collective(message.kind, times * message.bytes, group, device)
    ratios = []
    for _ in range(WARMUP + repetitions):
        dist.barrier(group=group)
        before_s = timed(compute)
        work = start()
        ratios.append(timed(compute) / before_s)
        work.wait()
    return max(1.0, median(ratios[WARMUP:]))


def wall_seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def stream_seconds(call: Callable[[], Any]) -> float:
    """Return the seconds on the current stream, without waiting for other streams such as NCCL's."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return seconds_between(begin, end)
