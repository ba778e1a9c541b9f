"""Seconds of every item, from marks at the doors of the sites.

    forward    start ─ norm ─ linear_qkv ─ (rotary) ─ core_attention ─ linear_proj ─ (bda) ─ end        module hooks
    backward   end ─ (bda) ─ linear_proj ─ core_attention ─ (rotary) ─ linear_qkv ─ norm ─ start        gradient hooks

A site's backward begins when the gradient of its output exists and ends when those of its arguments do; what lies between two
sites is the code item there. A mark is an event on the device's compute stream, and the host waits at the end of a pass only,
and has a head start (`head_start`): the time that it takes to issue each item is not in the item's figure.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_lynx.anatomy import CODE_ITEMS
from megatron_lynx.nest import all_in
from megatron_lynx.profiler.measured.half_run import HalfRun, InnerNorm, code_behind, first_of
from megatron_lynx.profiler.measured.head_start import HeadStart, head_start_on
from megatron_lynx.profiler.profile import BlockProfile

if TYPE_CHECKING:
    from megatron_lynx.runtime.device import Device, Event

WARMUP = 2
"""Passes before the first that counts: caches and allocators settle."""


def measure_block(run: Callable[[], Tensor], device: Device, repetitions: int = 9) -> BlockProfile:
    """Forward and backward seconds of anything that returns one tensor with a gradient, such as the model's head and its loss.

    What it saves is asked of `blocks.held_bytes`: noting that takes time.
    """
    forward, backward = [], []
    head_start = head_start_on(device)
    for repetition in range(WARMUP + repetitions):
        with head_start:
            start = mark(device)
            output = run()
            middle = mark(device)
            output.backward(torch.ones_like(output))
            end = mark(device)
        device.synchronize()
        if repetition >= WARMUP:
            forward.append(middle.seconds_since(start))
            backward.append(end.seconds_since(middle))
    return BlockProfile(forward_s=median(forward), backward_s=median(backward))


def item_seconds(run: HalfRun, head_start: HeadStart, repetitions: int) -> tuple[dict[str, float], dict[str, float]]:
    """Median forward and backward seconds of each item. What a linear makes of a norm inside is the norm's."""
    passes = [_timed_pass(run, head_start) for _ in range(WARMUP + repetitions)][WARMUP:]
    medians = [{item: median(one[index].get(item, 0.0) for one in passes) for item in run.section.names} for index in (0, 1)]
    arguments = _read_and_made(run)[0]
    _share_out(medians[1], run, arguments)
    for linear, norm in run.inner_norms.items():
        for seconds, alone_s in zip(medians, inner_norm_seconds(norm, arguments[linear], head_start, repetitions), strict=True):
            moved_s = min(alone_s, seconds[linear])
            seconds[norm.item], seconds[linear] = seconds[norm.item] + moved_s, seconds[linear] - moved_s
    return medians[0], medians[1]


def _share_out(backward_s: dict[str, float], run: HalfRun, arguments: dict[str, Tensor]) -> None:
    """Linears that read the same tensor have one gradient, which exists when the last of their backwards is over: by the sizes of
    their weights."""
    reading: dict[int, dict[str, int]] = {}
    for linear in run.section.linears:
        weights = run.sites[linear].get_parameter("weight").numel()
        reading.setdefault(arguments[linear].data_ptr(), {})[linear] = weights
    for weights_of in reading.values():
        all_s = sum(backward_s[linear] for linear in weights_of)
        for linear, weights in weights_of.items():
            backward_s[linear] = all_s * weights / sum(weights_of.values())


def inner_norm_seconds(norm: InnerNorm, rows: Tensor, head_start: HeadStart, repetitions: int) -> tuple[float, float]:
    """Forward and backward of the norm that a linear makes of these rows, alone: what of its seconds is not the linear's."""
    rows = rows.requires_grad_()
    with torch.no_grad():
        forward_s = median_seconds(lambda: norm.run(rows), head_start, repetitions)
    backward = []
    for _ in range(WARMUP + repetitions):
        output = norm.alone(rows)
        gradient = torch.ones_like(output)
        backward.append(seconds_of(partial(output.backward, gradient), head_start))
    return forward_s, median(backward[WARMUP:])


def _timed_pass(run: HalfRun, head_start: HeadStart) -> tuple[dict[str, float], dict[str, float]]:
    """One pass. A mark (item, event) ends that item's stretch; an item's stretches add up."""
    device = head_start.device
    forward_marks: list[tuple[str, Event]] = []
    backward_marks: list[tuple[str, Event]] = []
    code = [code_behind(run.section, None)]

    def on_gradient(tensor: Tensor, item: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: backward_marks.append((item, mark(device))))

    def entered(name: str, arguments: Any) -> None:
        forward_marks.append((code[0], mark(device)))
        for tensor in all_in(Tensor, arguments):
            on_gradient(tensor, name)  # when these gradients exist, the site's backward is over

    def left(name: str, outputs: Any) -> None:
        forward_marks.append((name, mark(device)))
        code[0] = code_behind(run.section, name)
        if code[0] in CODE_ITEMS:
            on_gradient(first_of(outputs), code[0])

    start = run.input.detach().requires_grad_()
    with head_start:
        with run.watched(entered, left):
            begin = mark(device)
            output = first_of(run.forward(start, **run.arguments))
        forward_marks.append((code[0], mark(device)))
        gradient = torch.ones_like(output)
        middle = mark(device)
        output.backward(gradient)
        backward_marks.append((run.section.norm, mark(device)))
    device.synchronize()
    return _stretches(begin, forward_marks), _stretches(middle, backward_marks)


def _stretches(begin: Event, marks: list[tuple[str, Event]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for item, event in marks:
        seconds[item] = seconds.get(item, 0.0) + event.seconds_since(begin)
        begin = event
    return seconds


def gradient_gemm_seconds(run: HalfRun, head_start: HeadStart, repetitions: int) -> dict[str, tuple[float, float]]:
    """Seconds of (dgrad, wgrad) of each linear: the two GEMMs of its backward, alone. Where its weight has a `main_grad`, wgrad
    is added to it, as in training."""
    arguments, outputs = (_as_matrices(tensors) for tensors in _read_and_made(run))
    result = {}
    for name in run.section.linears:
        weight, gradient, argument = run.sites[name].get_parameter("weight"), outputs[name], arguments[name]
        with torch.no_grad():
            dgrad = median_seconds(partial(torch.matmul, gradient, weight), head_start, repetitions)
            wgrad = median_seconds(partial(_weight_gradient, gradient, argument, weight), head_start, repetitions)
        result[name] = (dgrad, wgrad)
    return result


def _as_matrices(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.flatten(0, -2) for name, tensor in tensors.items()}


def _read_and_made(run: HalfRun) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The first tensor that each site reads, and the first that it makes."""
    arguments: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def entered(name: str, called_with: Any) -> None:
        arguments[name] = all_in(Tensor, called_with)[0].detach()

    def left(name: str, result: Any) -> None:
        outputs[name] = first_of(result).detach()

    with run.watched(entered, left), torch.no_grad():
        run.output()
    return arguments, outputs


def _weight_gradient(gradient: Tensor, argument: Tensor, weight: Tensor) -> Tensor:
    product = torch.matmul(gradient.t(), argument)
    return weight.main_grad.add_(product) if hasattr(weight, "main_grad") else product


def item_flops(run: HalfRun) -> dict[str, int]:
    """FLOPs of each site's forward."""

    flops: dict[str, int] = {}
    with FlopCounterMode(display=False) as counter:

        def entered(name: str, _: Any) -> None:
            flops[name] = -counter.get_total_flops()

        def left(name: str, _: Any) -> None:
            flops[name] += counter.get_total_flops()

        with run.watched(entered, left):
            run.output()
    return flops


def median_seconds(call: Callable[[], Any], head_start: HeadStart, repetitions: int) -> float:
    return median([seconds_of(call, head_start) for _ in range(WARMUP + repetitions)][WARMUP:])


def seconds_of(call: Callable[[], Any], head_start: HeadStart) -> float:
    """One call's seconds on the device. The host waits for its end."""
    with head_start:
        begin = mark(head_start.device)
        call()
        end = mark(head_start.device)
    head_start.device.synchronize()
    return end.seconds_since(begin)


def mark(device: Device) -> Event:
    """The point behind everything that the device was given to compute so far, on its own clock."""
    return device.current.record(timed=True)
