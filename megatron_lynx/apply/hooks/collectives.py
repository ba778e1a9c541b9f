"""Windows in collectives of the tensor-parallel group, and in exchanges of experts' tokens.

Replaces              local layers     `dist_all_gather_func` and `dist_reduce_scatter_func` in `mappings` and `layers` of
                                       `megatron.core.tensor_parallel` (bound there at import), `_gather_along_first_dim` of
                                       `mappings`, and `torch.distributed.all_reduce`; if an input is gathered once, kept or
                                       read by a delayed weight gradient, also `get_global_memory_buffer` in `layers`
                      TE's layers      `gather_along_first_dim` and `reduce_scatter_along_first_dim` as bound in `module.base`,
                                       `module.linear` and `module.layernorm_linear` of `transformer_engine.pytorch`; its
                                       `allreduce` ends in `torch.distributed.all_reduce`
                      latent attention `gather_from_sequence_parallel_region` in
                                       `megatron.core.transformer.multi_latent_attention`; of sparse attention in
                                       `experimental_attention_variant.absorbed_mla`
                      exchanges        `torch.distributed.all_to_all_single`, which Megatron's alltoall dispatcher calls in both
                                       passes; `dispatch` and `combine` of `deep_ep.Buffer`, which its flex dispatcher calls
Why                   compute waits in each of them. TE overlaps the gather of an input and the scatter of its gradient with
                      GEMMs; there the window is the rest. A recomputation must not communicate (rule R2): a gather of latent
                      attention is a site that is always kept. Megatron gathers into one global buffer, which must not overwrite
                      an input that a recomputation or a delayed weight gradient still reads.
Calls the original    once per call; in a window asynchronously, then waits if the call was synchronous. Latent attention's never
                      in a recomputation. The buffer's unless a frame has the gathered input.
Holds                 the groups.
Passes through when   the window has no task, the group is another one, the call is outside of a half and its backward (LM
                      head, loss, data parallel), or takes a maximum (FP8's amaxes). A gather that is already in flight is only
                      waited for: TE gets an alias, which it frees after use. DeepEP: also if no event is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_lynx.apply.hook import Claim, instead
from megatron_lynx.apply.transformer_engine import as_alias, with_bytes
from megatron_lynx.runtime.engine import Engine
from megatron_lynx.runtime.frame import DONE
from megatron_lynx.runtime.saved import is_wrapper
from megatron_lynx.runtime.site import Site


def claims(engine: Engine, group: Any) -> Iterator[Claim]:
    from megatron.core.tensor_parallel import layers, mappings

    in_window = partial(_in_window, engine, group)

    def served_or_in_window(original: Any, output: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = engine.started_gather(output)
        if work is None:
            waited_for = in_window(original, output, *args, **kwargs)
            if waited_for is None and engine.scope is not None:
                engine.scope.keep_gathered(output)
            return waited_for
        return waited(work, kwargs.get("async_op"))

    def served_gradient(original: Any, tensor: Tensor, of_group: Any, *args: Any, **kwargs: Any) -> Any:
        begun = engine.gathered_gradient(tensor) if of_group is group else None
        if begun is None:
            return original(tensor, of_group, *args, **kwargs)
        whole, work = begun
        work.wait()
        return whole

    reason = "gathers a gradient that may be under way already"
    yield Claim(mappings, "_gather_along_first_dim", instead(served_gradient), reason)
    for module in (mappings, layers):
        yield Claim(module, "dist_reduce_scatter_func", instead(in_window), "scatters a half's output or gradient")
    yield Claim(mappings, "dist_all_gather_func", instead(in_window), "gathers a gradient")
    yield Claim(layers, "dist_all_gather_func", instead(served_or_in_window), "gathers a half's input")
    yield Claim(torch.distributed, "all_reduce", instead(in_window), "reduces a half's output or gradient")


def buffer_claim(engine: Engine) -> Claim:
    from megatron.core.tensor_parallel import layers

    def get_global_memory_buffer(original: Any) -> Any:
        if (gathering := engine.gathering) is not None:
            return SimpleNamespace(get_tensor=partial(_held, gathering[0]))
        shared = original()
        owns = engine.scope is not None and engine.scope.owns_gathered
        if owns or engine.weight_gradients.puts_off_gathered:
            return SimpleNamespace(get_tensor=lambda *args, **kwargs: torch.empty_like(shared.get_tensor(*args, **kwargs)))
        return shared

    return Claim(layers, "get_global_memory_buffer", instead(get_global_memory_buffer), "lends the buffer for a gathered input")


def _held(gathered: Tensor, tensor_shape: Any, dtype: torch.dtype, name: str, *args: Any, **kwargs: Any) -> Tensor:
    asked, held = (tuple(tensor_shape), dtype), (tuple(gathered.shape), gathered.dtype)
    assert asked == held, f"{name}: {asked} asked, {held} held"
    return gathered


def start_gather(group: Any) -> Any:
    """Make an asynchronous all-gather along the first dimension: `tensor [s/t, b, h] -> (buffer [s, b, h], Work)`."""

    def gather(tensor: Tensor) -> tuple[Tensor, Any]:
        source = tensor.contiguous()
        buffer = source.new_empty((source.size(0) * group.size(), *source.shape[1:]))
        return buffer, torch.distributed.all_gather_into_tensor(buffer, source, group=group, async_op=True)

    return gather


def _in_window(engine: Engine, group: Any, original: Any, /, *args: Any, exchange: bool = False, **kwargs: Any) -> Any:
    offered = kwargs.get("group") is group and not _takes_largest(*args, **kwargs)
    window = engine.window(exchange=exchange) if offered else None
    if window is None:
        return original(*args, **kwargs)
    return waited(window(original(*args, **{**kwargs, "async_op": True})), kwargs.get("async_op"))


def _takes_largest(tensor: Any, op: Any = None, *args: Any, **kwargs: Any) -> bool:
    return isinstance(op, type(torch.distributed.ReduceOp.MAX)) and op == torch.distributed.ReduceOp.MAX


def waited(work: Any, async_op: bool | None) -> Any:
    if async_op:
        return work
    work.wait()
    return None


def te_claims(engine: Engine, group: Any) -> Iterator[Claim]:
    from transformer_engine.pytorch.module import base, layernorm_linear, linear

    def in_window(original: Any, tensor: Tensor, tp_group: Any = None, async_op: bool = False, **kwargs: Any) -> Any:
        window = engine.window() if tp_group is group else None
        if window is None:
            return original(tensor, tp_group, async_op, **kwargs)
        output, work = original(tensor, tp_group, True, **kwargs)
        return output, waited(window(work or DONE), async_op)  # FP8 that is needed by columns has been waited for

    def served_or_in_window(original: Any, tensor: Any, process_group: Any, async_op: bool = False, **kwargs: Any) -> Any:
        gathering = engine.gathering if process_group is group else None
        if gathering is None:
            whole, work = in_window(original, tensor, process_group, async_op, **kwargs)
            if process_group is group and work is None and (scope := engine.scope) is not None and scope.owns_gathered:
                scope.keep_gathered(as_alias(whole) if is_wrapper(whole) else whole)
            return whole, work
        return _of_kind(tensor, gathering[0]), waited(engine.started_gather(gathering[0]), async_op)

    def served_gradient(original: Any, tensor: Any, process_group: Any, async_op: bool = False, **kwargs: Any) -> Any:
        plain = process_group is group and not kwargs and isinstance(tensor, Tensor)
        begun = engine.gathered_gradient(tensor) if plain else None
        if begun is None:
            return in_window(original, tensor, process_group, async_op, **kwargs)
        return begun[0], waited(begun[1], async_op)

    for module in (linear, layernorm_linear):
        yield Claim(module, "reduce_scatter_along_first_dim", instead(in_window), "scatters a half's output or gradient")
    yield Claim(base, "gather_along_first_dim", instead(served_gradient), "gathers a gradient")
    for module in (linear, layernorm_linear):
        yield Claim(module, "gather_along_first_dim", instead(served_or_in_window), "gathers a linear's input")


def _of_kind(tensor: Any, gathered: Any) -> Any:
    if is_wrapper(gathered):
        return as_alias(gathered)
    return gathered.detach() if isinstance(tensor, Tensor) else with_bytes(tensor, gathered.detach())


def latent_claim(engine: Engine, module: str) -> Claim:
    """`module`: of the attention's class, which imports the gather by name."""

    def remembered(original: Any) -> Any:
        site = Site("gathered latents", torch.nn.Module(), original, may_draw=False)
        return wraps(original)(engine.reported(site))

    return Claim(import_module(module), "gather_from_sequence_parallel_region", remembered, "gathers what was compressed")


def exchange_claim(engine: Engine, group: Any) -> Claim:
    exchange = partial(_in_window, engine, group, exchange=True)
    return Claim(torch.distributed, "all_to_all_single", instead(exchange), "brings tokens to experts, and back")


class WindowedEvent:
    """An event of a buffer's stream whose wait is a window; otherwise it behaves like the event."""

    def __init__(self, event: Any, window: Callable[[Any], Any]) -> None:
        self._event = event
        self.current_stream_wait = window(SimpleNamespace(wait=event.current_stream_wait)).wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)


def deepep_claims(engine: Engine) -> Iterator[Claim]:
    from megatron.core.transformer.moe import fused_a2a

    def in_window(original: Any) -> Any:
        @wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            window = engine.window(exchange=True) if kwargs.get("async_finish") else None
            outputs = original(*args, **kwargs)
            return outputs if window is None else (*outputs[:-1], WindowedEvent(outputs[-1], window))

        return method

    for name in ("dispatch", "combine"):
        yield Claim(fused_a2a.Buffer, name, in_window, "brings tokens to experts, and back")
