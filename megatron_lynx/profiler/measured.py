"""Measuring one real layer on this machine: every item forward and backward, and every memory block it saves.

    forward    start ─ norm ─ linear_qkv ─ (rotary) ─ core_attention ─ linear_proj ─ (bda) ─ end
    backward   end ─ (bda) ─ linear_proj ─ ...                                          norm ─ start

Marks lie at the entry and the exit of each site: module hooks in forward, gradient hooks on the same tensors in backward. What
passes between two sites is the code item there. The layer is handed in, of one rank and without a group: a tensor-parallel
shard is a layer with a share of the heads and of the FFN (`shard_arguments`), so that no communication is in the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_lynx.config.job import Job
from megatron_lynx.items import CODE_ITEMS, COLUMN_PARALLEL, ITEMS_OF, ROW_PARALLEL, Half
from megatron_lynx.profiler.profile import BlockSeconds, HalfProfile, ItemProfile, SavedTensor, Shape

if TYPE_CHECKING:
    from torch import Tensor, nn

WARMUP = 2
"""Passes before the first that counts: caches and allocators settle."""


def shape_of(job: Job) -> Shape:
    """What a profile of this job is a profile of."""
    model, parallel = job.model, job.parallel
    facts = {name: getattr(model, name) for name in ("hidden", "ffn", "heads", "kv_groups", "seq", "dtype")}
    return Shape(micro=job.batch.micro, tensor=parallel.tensor, sequence_parallel=parallel.sequence_parallel, **facts)


def shard_arguments(job: Job) -> dict[str, Any]:
    """Arguments of Megatron's `TransformerConfig` that make a layer without a group do the work of one tensor-parallel rank."""
    model, tensor = job.model, job.parallel.tensor
    return {
        "num_attention_heads": model.heads // tensor,
        "num_query_groups": model.kv_groups // tensor,
        "kv_channels": model.head_size,
        "ffn_hidden_size": model.ffn // tensor,
        "sequence_parallel": False,
    }


def measure_layer(
    layer: nn.Module, hidden: Tensor, arguments: dict[str, Any], *, sequence_shards: int = 1, repetitions: int = 9
) -> dict[Half, HalfProfile]:
    """Both halves of a `TransformerLayer` in training mode.

    `hidden` is the layer's input on all rows; `arguments` are the other arguments of its forward (mask, rotary tables).
    `sequence_shards` is the tensor-parallel size under sequence parallelism: norms, dropouts and residuals then do that share
    of the rows, and their figures are divided by it.
    """
    attention = _HalfRun("attention", layer._forward_attention, arguments, hidden, _sites_of(layer, "attention"))  # type: ignore[operator]
    output = attention.output().detach()
    mlp = _HalfRun("mlp", layer._forward_mlp, {}, output, _sites_of(layer, "mlp"))  # type: ignore[operator]
    return {run.half: _profile(run, sequence_shards, repetitions) for run in (attention, mlp)}


def measure_block(run: Callable[[], Tensor], repetitions: int = 9) -> BlockSeconds:
    """Forward and backward seconds of anything that returns one tensor with a gradient, such as the model's head and its loss."""
    import torch

    forward, backward = [], []
    for repetition in range(WARMUP + repetitions):
        start = _now()
        output = run()
        middle = _now()
        output.backward(torch.ones_like(output))
        if repetition >= WARMUP:
            forward.append(middle - start)
            backward.append(_now() - middle)
    return BlockSeconds(forward_s=median(forward), backward_s=median(backward))


def _sites_of(layer: Any, half: Half) -> dict[str, nn.Module]:
    attention, mlp = layer.self_attention, layer.mlp
    if half == "attention":
        inside = {name: getattr(attention, name) for name in ("linear_qkv", "core_attention", "linear_proj")}
        return {"input_layernorm": layer.input_layernorm, **inside}
    return {"pre_mlp_layernorm": layer.pre_mlp_layernorm, "linear_fc1": mlp.linear_fc1, "linear_fc2": mlp.linear_fc2}


@dataclass
class _HalfRun:
    """One half, ready to be run again and again from the same input."""

    half: Half
    forward: Callable[..., Any]
    arguments: dict[str, Any]
    input: Tensor
    sites: dict[str, nn.Module]

    def output(self) -> Tensor:
        result = self.forward(self.input.detach().requires_grad_(), **self.arguments)
        return _first(result)

    @contextmanager
    def watched(self, entered: Callable[[str, Any], None], left: Callable[[str, Any], None]) -> Iterator[None]:
        """Call back at the entry of every site with its arguments, and at its exit with its outputs."""
        handles = []
        for name, module in self.sites.items():
            handles.append(
                module.register_forward_pre_hook(lambda _, args, kwargs, name=name: entered(name, (args, kwargs)), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(lambda _, args, output, name=name: left(name, output)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _profile(run: _HalfRun, shards: int, repetitions: int) -> HalfProfile:
    forward, backward = _seconds(run, repetitions)
    tensors, outputs = _blocks(run)
    flops = _flops(run)
    gemms = _gradient_gemms(run, repetitions)
    order = ITEMS_OF[run.half]
    on_own_rows = {order[0], order[-1]}  # the norm and the bias-dropout-add

    def share(item: str) -> int:
        return shards if item in on_own_rows else 1

    tensors = tuple(tensor.model_copy(update={"bytes": tensor.bytes // share(tensor.made_by)}) for tensor in tensors)
    items = {
        item: ItemProfile(
            forward_s=forward.get(item, 0.0) / share(item),
            backward_s=backward.get(item, 0.0) / share(item),
            saved_bytes=sum(tensor.bytes for tensor in tensors if tensor.saved_by[:1] == (item,)),
            output_bytes=outputs.get(item, 0) // (shards if item in (*on_own_rows, *ROW_PARALLEL) else 1),
            flops=flops.get(item, 0),
            dgrad_s=gemms.get(item, (0.0, 0.0))[0],
            wgrad_s=gemms.get(item, (0.0, 0.0))[1],
        )
        for item in order
    }
    return HalfProfile(input_bytes=_nbytes(run.input) // shards, items=items, tensors=tensors)


def _code_behind(half: Half, site: str | None) -> str:
    """The item that code belongs to which runs after `site` (None: before the first)."""
    order = ITEMS_OF[half]
    if site is None:
        return order[0]
    behind = order[min(order.index(site) + 1, len(order) - 1)]
    return behind if behind in CODE_ITEMS else site


def _seconds(run: _HalfRun, repetitions: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median forward and backward seconds of each item."""
    passes = [_timed_pass(run) for _ in range(WARMUP + repetitions)][WARMUP:]
    medians = [{item: median(one[index].get(item, 0.0) for one in passes) for item in ITEMS_OF[run.half]} for index in (0, 1)]
    return medians[0], medians[1]


def _timed_pass(run: _HalfRun) -> tuple[dict[str, float], dict[str, float]]:
    """One pass. A mark (item, second) ends that item's stretch; an item's stretches add up."""
    import torch

    forward_marks: list[tuple[str, float]] = []
    backward_marks: list[tuple[str, float]] = []
    code = [_code_behind(run.half, None)]

    def on_gradient(tensor: Tensor, item: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: backward_marks.append((item, _now())))

    def entered(name: str, arguments: Any) -> None:
        forward_marks.append((code[0], _now()))
        for tensor in _tensors(arguments):
            on_gradient(tensor, name)  # when these gradients exist, the site's backward is over

    def left(name: str, outputs: Any) -> None:
        forward_marks.append((name, _now()))
        code[0] = _code_behind(run.half, name)
        if code[0] in CODE_ITEMS:
            on_gradient(_first(outputs), code[0])

    start = run.input.detach().requires_grad_()
    with run.watched(entered, left):
        begin = _now()
        output = _first(run.forward(start, **run.arguments))
    forward_marks.append((code[0], _now()))
    gradient = torch.ones_like(output)
    middle = _now()
    output.backward(gradient)
    backward_marks.append((ITEMS_OF[run.half][0], _now()))
    return _stretches(begin, forward_marks), _stretches(middle, backward_marks)


def _stretches(begin: float, marks: list[tuple[str, float]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for item, second in marks:
        seconds[item] = seconds.get(item, 0.0) + second - begin
        begin = second
    return seconds


@dataclass
class _Block:
    bytes: int
    made_by: str
    saved_by: list[str] = field(default_factory=list)
    output: bool = False


def _blocks(run: _HalfRun) -> tuple[tuple[SavedTensor, ...], dict[str, int]]:
    """The memory blocks of one pass, and the bytes of each site's output.

    Two passes are recorded and held: what both have in common (parameters, masks, rotary tables, the input) is not theirs.
    """
    first, second = _recorded(run), _recorded(run)
    own = [block for address, block in second[0].items() if address not in first[0] and (block.saved_by or block.output)]
    tensors = tuple(
        SavedTensor(bytes=block.bytes, made_by=block.made_by, saved_by=tuple(block.saved_by), output=block.output)
        for block in own
        if block.saved_by or block.made_by == COLUMN_PARALLEL[run.half]
    )
    return tensors, second[1]


def _recorded(run: _HalfRun) -> tuple[dict[int, _Block], dict[str, int], Any]:
    """One pass under saved-tensor hooks. The third is to be held: it keeps every address seen from being used again."""
    import torch

    blocks: dict[int, _Block] = {}
    outputs: dict[str, int] = {}
    held: list[Tensor] = []
    item = [_code_behind(run.half, None)]

    def seen(tensor: Tensor) -> _Block:
        held.append(tensor.detach())
        storage = tensor.untyped_storage()
        return blocks.setdefault(storage.data_ptr(), _Block(storage.nbytes(), item[0]))

    def pack(tensor: Tensor) -> Tensor:
        block = seen(tensor)
        if item[0] not in block.saved_by:
            block.saved_by.append(item[0])
        return tensor.detach()

    def entered(name: str, arguments: Any) -> None:
        for tensor in _tensors(arguments):
            seen(tensor)
        item[0] = name

    def left(name: str, result: Any) -> None:
        block = seen(_first(result))
        block.output = block.output or block.made_by == name
        outputs[name] = _nbytes(_first(result))
        item[0] = _code_behind(run.half, name)

    start = run.input.detach().requires_grad_()
    blocks[start.untyped_storage().data_ptr()] = _Block(_nbytes(start), "input")
    with run.watched(entered, left), torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        result = run.forward(start, **run.arguments)
    outputs[ITEMS_OF[run.half][-1]] = _nbytes(_first(result))
    return blocks, outputs, (held, result)


def _flops(run: _HalfRun) -> dict[str, int]:
    """FLOPs of each site's forward."""
    from torch.utils.flop_counter import FlopCounterMode

    flops: dict[str, int] = {}
    with FlopCounterMode(display=False) as counter:

        def entered(name: str, _: Any) -> None:
            flops[name] = -counter.get_total_flops()

        def left(name: str, _: Any) -> None:
            flops[name] += counter.get_total_flops()

        with run.watched(entered, left):
            run.output()
    return flops


def _gradient_gemms(run: _HalfRun, repetitions: int) -> dict[str, tuple[float, float]]:
    """Seconds of (dgrad, wgrad) of each linear: the two GEMMs of its backward, alone."""
    import torch

    arguments: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def entered(name: str, called_with: Any) -> None:
        arguments[name] = next(_tensors(called_with)).detach().flatten(0, -2)

    def left(name: str, result: Any) -> None:
        outputs[name] = _first(result).detach().flatten(0, -2)

    with run.watched(entered, left), torch.no_grad():
        run.output()
    result = {}
    for name in (name for name in run.sites if name.startswith("linear_")):
        weight, gradient, argument = run.sites[name].weight, outputs[name], arguments[name]
        with torch.no_grad():
            dgrad = _median_seconds(lambda g=gradient, w=weight: g.matmul(w), repetitions)
            wgrad = _median_seconds(lambda g=gradient, x=argument: g.t().matmul(x), repetitions)
        result[name] = (dgrad, wgrad)
    return result


def _median_seconds(call: Callable[[], Any], repetitions: int) -> float:
    seconds = []
    for repetition in range(WARMUP + repetitions):
        start = _now()
        call()
        if repetition >= WARMUP:
            seconds.append(_now() - start)
    return median(seconds)


def _now() -> float:
    """The clock, when the device has finished what it was given."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _first(outputs: Any) -> Tensor:
    return next(_tensors(outputs))


def _tensors(value: Any) -> Iterator[Tensor]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
