"""From a plan to what the runtime follows: a policy for every half, windows with their tasks, the order of passes."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch.nn import Module

from megatron_lynx.anatomy import Half, Section
from megatron_lynx.anatomy.address import BACKWARD_PHASES, ON_DEMAND, BackwardPhase, Window, window_at
from megatron_lynx.apply.site import may_draw_in
from megatron_lynx.kinds.running import sections_in
from megatron_lynx.plan.order import frames_of, gather_of, halves_ahead, stretches_of
from megatron_lynx.plan.plan import Plan, Stage
from megatron_lynx.runtime.forward_hooks import NO_HOOKS, ForwardHooks
from megatron_lynx.runtime.pending import Linear
from megatron_lynx.runtime.policy import DeferralPolicy, HalfPolicy
from megatron_lynx.runtime.stage_order import OrderOfStep, ScheduledPass, StageOrder
from megatron_lynx.runtime.task import Gather, Replay, Task, WeightGradient
from megatron_lynx.runtime.windows import Windows
from megatron_lynx.schedule.one_stage import passes_of


def policies(
    plan: Plan, stage: Stage, gather: Callable[[Any], Any], modules: Mapping[int, Module]
) -> dict[int, dict[Half, HalfPolicy]]:
    """The policy of every half of a chunk, by layer number. `modules`: the layers that Megatron built."""
    return {
        layer: {
            section.half: _policy(plan, stage, layer, section, gather, modules[layer]) for section in sections_in(modules[layer])
        }
        for layer in stage.layers
    }


def _policy(plan: Plan, stage: Stage, layer: int, section: Section, gather: Callable[[Any], Any], module: Module) -> HalfPolicy:
    replayed = frozenset(stage.rule_for(layer).replays(section.half))
    hooks = ForwardHooks(module.modules(), _waits_for_weights) if replayed else NO_HOOKS
    gathers = plan.parallel.sequence_parallel and section.gathered in replayed
    offloads = stage.offload is not None and (not section.in_some_layers or stage.offload.experts)
    return HalfPolicy(
        layer=layer,
        section=section,
        replay=replayed,
        gather_site=section.gathered if gathers else None,
        gather=gather if gathers else None,
        keeps_gathered=replayed.intersection(section.gathering_latents if plan.parallel.sequence_parallel else ()),
        chunk=stage.chunk,
        may_draw=may_draw_in(section, module, replayed),
        stays=not offloads,
        ahead=halves_ahead(stage, (layer, section.half)),
        hooks=hooks,
    )


def _waits_for_weights(hook: Callable[..., Any]) -> bool:
    """Megatron's own hook on every module, with --overlap-param-gather. In a replay its weights are there."""
    return getattr(hook, "__module__", "") == "megatron.core.distributed.distributed_data_parallel"


def passing_over(
    of_layer: Mapping[int, Mapping[Half, HalfPolicy]], windows: Sequence[Windows], offloading: Container[int]
) -> dict[int, dict[Half, HalfPolicy]]:
    """The same policies of a stage; halves in which nothing ever happens know it, and those behind them.

    `windows`: of all chunks. `offloading`: chunks that send something to the host.
    """
    marked: dict[int, dict[Half, HalfPolicy]] = {}
    below: HalfPolicy | None = None
    for layer, halves in of_layer.items():
        marked[layer] = {}
        for half, policy in halves.items():
            own = windows[policy.chunk]
            defers = any((layer, linear) in own.deferral.linears for linear in policy.section.linears)
            busy = (
                policy.goes_out(offloading)
                or defers
                or bool(policy.replay)
                or any(each.serves((layer, half), own) for each in windows)
            )
            of_chunk = below is not None and below.chunk == policy.chunk
            below = replace(policy, passed_over=not busy, below_passed_over=of_chunk and below.passed_over)  # type: ignore[union-attr]
            marked[layer][half] = below
    return marked


def windows(stage: Stage) -> Windows:
    """Which tasks of a chunk run in which window, by phase. Those of one window run in the order in which backward needs them."""
    deferred: dict[Window, tuple[Task, ...]] = {}
    for linear, waits in _deferring(stage):
        for wait in waits:
            _assign(deferred, window_at(wait, linear[0]), WeightGradient(linear))
    during: dict[BackwardPhase, dict[Window, tuple[Task, ...]]] = {phase: {} for phase in BACKWARD_PHASES}
    behind: dict[BackwardPhase, dict[Window, tuple[Task, ...]]] = {phase: {} for phase in BACKWARD_PHASES}
    for half in frames_of(stage):
        for phase in BACKWARD_PHASES:
            for window, until in stretches_of(stage, half, phase):
                _assign(during[phase], window, Replay(half, until))
            _assign(behind[phase], gather_of(stage, half, phase), Gather(half))
    most_bytes = 0 if stage.weight_gradients is None else stage.weight_gradients.bytes
    return Windows(
        during=during,
        behind=behind,
        weight_gradients=deferred,
        deferral=DeferralPolicy(frozenset(linear for linear, _ in _deferring(stage)), most_bytes),
        ahead_depth=stage.ahead_depth,
        whole=stage.whole or (),
        first_layer=stage.layers.first,
    )


def _deferring(stage: Stage) -> Iterator[tuple[Linear, tuple[str, ...]]]:
    """The linears that defer their weight gradients, in the order in which backward reaches them, and the waits of each."""
    for layer, half in frames_of(stage):
        rule = stage.rule_for(layer)
        linears = (linear for linear in reversed(rule.filling(half).linears) if linear in rule.weight_gradients)
        yield from (((layer, linear), rule.weight_gradients[linear]) for linear in linears)


def _assign(tasks: dict[Window, tuple[Task, ...]], window: Window | None, task: Task) -> None:
    if window is not None and window != ON_DEMAND:
        tasks[window] = (*tasks.get(window, ()), task)


def order_of(pipeline: int, stage: int, chunks: int, group_size: int) -> OrderOfStep:
    """What a stage does in a step, by the number of micro-batches.

    `group_size`: Megatron's `microbatch_group_size_per_vp_stage`.
    """

    @lru_cache(maxsize=8)
    def order(microbatches: int) -> StageOrder:
        passes = passes_of(pipeline, stage, microbatches, chunks, group_size)
        return StageOrder([ScheduledPass(action.kind, action.micro_batch, action.chunk, phase) for action, phase in passes])  # type: ignore[arg-type]

    return order
