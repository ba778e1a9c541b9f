"""Seconds of every item of one half of a real layer, from events at the entry and exit of sites.

    forward    start ─ [norm] ─ [linear_qkv] ─ (rotary) ─ [core_attention] ─ [linear_proj] ─ (bda) ─ end       [site]  (code)
    backward   end ─ (bda) ─ [linear_proj] ─ [core_attention] ─ (rotary) ─ [linear_qkv] ─ [norm] ─ start       gradient hooks

A site's backward lasts from the gradient of its output to those of its arguments; the time between two sites belongs to the code
item there. Events are on the device's compute stream. Before each timed pass, products of matrices are queued on the device, so
that the host issues the pass ahead of the device:

    without      host    [ issue a ][ issue b ][ issue c ]                    b's event waits for the host: Python's time is
                 device             [a]        [b]        [c]                 included in a, b and c

    with         host    [ issue products, a, b, c ]
                 device        [ products ..................... ][a][b][c]    events measure device time only

Host time is measured separately (`testbed.host_time`). The products also put the GPU under load: at its power limit it lowers its
clock, and a layer of Llama 3 8B takes an H100 a sixth longer than in passes with pauses. On a CPU there are none.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from megatron_lynx.anatomy import Section
from megatron_lynx.nest import all_in
from megatron_lynx.profiler.profile import BlockProfile
from megatron_lynx.timeline import seconds_between

if TYPE_CHECKING:
    from megatron_lynx.apply.hooks.sites import Place
    from megatron_lynx.runtime.device import Device, Event


@dataclass(frozen=True)
class InnerNorm:
    """A norm inside a Transformer Engine linear, which has no hooks."""

    item: str
    run: Callable[[Tensor], Any]
    """Runs the norm alone, without a graph, as the linear does."""
    saved: Callable[[Any, Any], tuple[Tensor | None, ...]]
    """Returns the norm's tensors among those that the linear's node saved, from its (outputs, arguments); the last two are
    statistics."""
    alone: Callable[[Tensor], Tensor]
    """Runs the same kernels as a separate module, to time their backward."""


@dataclass
class HalfRun:
    section: Section
    forward: Callable[..., Any]
    arguments: dict[str, Any]
    input: Tensor
    places: Sequence[Place]
    inner_norms: Mapping[str, InnerNorm] = field(default_factory=dict)

    def output(self) -> Tensor:
        result = self.forward(self.input.detach().requires_grad_(), **self.arguments)
        return first_of(result)

    @contextmanager
    def watched(self, entered: Callable[[Place, Any], None], left: Callable[[Place, Any], None]) -> Iterator[None]:
        """Call back at the entry of every site with its arguments, and at its exit with its outputs. Sites get aliases of their
        arguments: the gradient of an alias is complete when this site's backward is, though other sites read the same tensor."""

        def watching(place: Place, original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def call(*args: Any, **named: Any) -> Any:
                args, named = tuple(map(_alias, args)), {name: _alias(value) for name, value in named.items()}
                entered(place, (args, named))
                outputs = original(*args, **named)
                left(place, outputs)
                return outputs

            return call

        with ExitStack() as undo:
            for place in self.places:
                owner, method = place.owner, place.method
                original = getattr(owner, method)
                restore = partial(setattr, owner, method, original) if method in vars(owner) else partial(delattr, owner, method)
                undo.callback(restore)
                setattr(owner, method, watching(place, original))
            yield

    def linear(self, item: str) -> Any:
        return next(place.owner for place in self.places if place.item.name == item)


def _alias(value: Any) -> Any:
    return value.view_as(value) if type(value) is Tensor and value.requires_grad else value


def code_behind(section: Section, site: str | None) -> str:
    return section.norm if site is None else section.code_behind.get(site, site)


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def first_of(outputs: Any) -> Tensor:
    return all_in(Tensor, outputs)[0]


LONGER = 2.0
"""Duration of the products, relative to the host time of the previous pass."""
SHORTEST_S, LONGEST_S = 0.01, 0.25
WIDTH = 8192
"""Matrix width: a product takes an A100 some 4 ms, an H100 1.5."""


class HeadStart:
    def __init__(self, device: Device, busy: Callable[[float], None] | None = None) -> None:
        """`busy`: gives the device work for about this many seconds; None on a CPU."""
        self.device = device
        self._busy = busy
        self._host_s = 0.0
        self._begin_s = 0.0

    def renew(self) -> None:
        if self._busy is not None:
            self._busy(min(max(LONGER * self._host_s, SHORTEST_S), LONGEST_S))

    def __enter__(self) -> HeadStart:
        self.renew()
        self._begin_s = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._host_s = time.perf_counter() - self._begin_s


def head_start_on(device: Device) -> HeadStart:
    return HeadStart(device, _products_on(device) if device.where.type == "cuda" else None)


def _products_on(device: Device) -> Callable[[float], None]:
    """Return a function that queues products of matrices that take about a given time."""
    factor = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device.where)
    multiply = partial(torch.mm, factor, factor, out=torch.empty_like(factor))
    _, one_s = (seconds_of(multiply, HeadStart(device)) for _ in range(2))  # the first one selects its kernel

    def issue(seconds: float) -> None:
        for _ in range(math.ceil(seconds / one_s)):
            multiply()

    issue(1.0)
    return issue


WARMUP = 2


def measure_block(run: Callable[[], Tensor], device: Device, repetitions: int = 9) -> BlockProfile:
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
            forward.append(seconds_between(start, middle))
            backward.append(seconds_between(middle, end))
    return BlockProfile(forward_s=median(forward), backward_s=median(backward))


def item_seconds(run: HalfRun, head_start: HeadStart, repetitions: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median forward and backward seconds of each item. A norm inside a linear is separated from it."""
    passes = [_timed_pass(run, head_start) for _ in range(WARMUP + repetitions)][WARMUP:]
    medians = [{item: median(one[index].get(item, 0.0) for one in passes) for item in run.section.names} for index in (0, 1)]
    arguments = _read_and_made(run)[0]
    for linear, norm in run.inner_norms.items():
        for seconds, alone_s in zip(medians, inner_norm_seconds(norm, arguments[linear], head_start, repetitions), strict=True):
            moved_s = min(alone_s, seconds[linear])
            seconds[norm.item], seconds[linear] = seconds[norm.item] + moved_s, seconds[linear] - moved_s
    return medians[0], medians[1]


def inner_norm_seconds(norm: InnerNorm, rows: Tensor, head_start: HeadStart, repetitions: int) -> tuple[float, float]:
    rows = rows.requires_grad_()
    with torch.no_grad():
        forward_s = median_seconds(lambda: norm.run(rows), head_start, repetitions)
    outputs = (norm.alone(rows) for _ in range(WARMUP + repetitions))
    backward = [seconds_of(partial(output.backward, torch.ones_like(output)), head_start) for output in outputs]
    return forward_s, median(backward[WARMUP:])


EXCHANGE = ""
"""Name of the intervals in which rows are exchanged: they belong to no item."""


def exchanges_rows(place: Place) -> bool:
    return place.item.exchanges and place.method == place.item.methods[1]


def _timed_pass(run: HalfRun, head_start: HeadStart) -> tuple[dict[str, float], dict[str, float]]:
    """Time one pass. An event (item, event) ends an interval of that item; an item's intervals are summed."""
    device = head_start.device
    forward_marks: list[tuple[str, Event]] = []
    backward_marks: list[tuple[str, Event]] = []
    code = [code_behind(run.section, None)]

    def on_gradient(tensor: Tensor, item: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(lambda _: backward_marks.append((item, mark(device))))

    def entered(place: Place, arguments: Any) -> None:
        forward_marks.append((code[0], mark(device)))
        for tensor in all_in(Tensor, arguments):
            on_gradient(tensor, EXCHANGE if exchanges_rows(place) else place.item.name)  # its backward is complete then

    def left(place: Place, outputs: Any) -> None:
        if exchanges_rows(place):
            head_start.renew()  # the host has waited for the number of rows
        forward_marks.append((EXCHANGE if exchanges_rows(place) else place.item.name, mark(device)))
        code[0] = code_behind(run.section, place.item.name)
        if code[0] in run.section.code:
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
        seconds[item] = seconds.get(item, 0.0) + seconds_between(begin, event)
        begin = event
    return seconds


def gradient_gemm_seconds(run: HalfRun, head_start: HeadStart, repetitions: int) -> dict[str, tuple[float, float]]:
    """Return the (dgrad, wgrad) seconds of each linear's backward GEMMs, run alone. With a `main_grad`, wgrad accumulates into
    it, as in training. Linears of experts, which may be one kernel, are left out."""
    arguments, outputs = _read_and_made(run)
    result = {}

    def weight_gradient(gradient: Tensor, argument: Tensor, weight: Tensor) -> Tensor:
        product = torch.matmul(gradient.t(), argument)
        return weight.main_grad.add_(product) if hasattr(weight, "main_grad") else product

    for name in (item.name for item in run.section.items if item.is_linear):
        weight = run.linear(name).get_parameter("weight")
        gradient, argument = outputs[name].flatten(0, -2), arguments[name].flatten(0, -2)
        with torch.no_grad():
            dgrad = median_seconds(partial(torch.matmul, gradient, weight), head_start, repetitions)
            wgrad = median_seconds(partial(weight_gradient, gradient, argument, weight), head_start, repetitions)
        result[name] = (dgrad, wgrad)
    return result


def _read_and_made(run: HalfRun) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    arguments: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def entered(place: Place, called_with: Any) -> None:
        arguments[place.item.name] = all_in(Tensor, called_with)[0].detach()

    def left(place: Place, result: Any) -> None:
        outputs[place.item.name] = first_of(result).detach()

    with run.watched(entered, left), torch.no_grad():
        run.output()
    return arguments, outputs


def item_flops(run: HalfRun) -> dict[str, int]:
    flops: Counter[str] = Counter()
    with FlopCounterMode(display=False) as counter:

        def entered(place: Place, _: Any) -> None:
            flops[place.item.name] -= counter.get_total_flops()

        def left(place: Place, _: Any) -> None:
            flops[place.item.name] += counter.get_total_flops()

        with run.watched(entered, left):
            run.output()
    return flops


def median_seconds(call: Callable[[], Any], head_start: HeadStart, repetitions: int) -> float:
    return median([seconds_of(call, head_start) for _ in range(WARMUP + repetitions)][WARMUP:])


def seconds_of(call: Callable[[], Any], head_start: HeadStart) -> float:
    with head_start:
        begin = mark(head_start.device)
        call()
        end = mark(head_start.device)
    head_start.device.synchronize()
    return seconds_between(begin, end)


def mark(device: Device) -> Event:
    return device.record(timed=True)
