"""Captured graphs on a CPU: what a capture ran is run again on the same memory, and no Python of the model with it.

    capture    the layer's code runs once, and every operator below autograd is recorded, with the tensors that it read and made
    replay     inputs are copied into the tensors of the capture, and the recorded operators run again, each into the tensor that
               it made then: nothing of the model's Python is called, so a hook in it is not, either

Megatron drives it as it drives CUDA's: `TECudaGraphHelper` captures, `GraphableMegatronModule` replays. What is stood in for is
Transformer Engine's `make_graphed_callables`, for whose graphs a GPU is needed, and the device's generator, whose states a graph
holds on to (`torch.Generator.graphsafe_set_state`, which the CPU's refuses). A state is set while a graph is captured, too: that
is recorded like an operator, because a GPU's kernels draw from the state that was in use at their capture.

    forward of a module     one recording, one more for its backward, for each micro-batch that Megatron asks for
    collectives             are recorded, and waited for at once when they run again
    what the host reads     stays what it was at the capture. (CUDA refuses to wait for the host in a capture; Megatron's tracker
                            reads a comparison of what is on the CPU anyway)

An operator's result that is kept by eager code, and overwritten by a later replay of the same graph before its backward, fails in
autograd ("modified by an inplace operation"): on a GPU it would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_lynx.testbed.cpu_device import ignore


class Recording(TorchDispatchMode):
    """Operators in the order in which they ran, to be run again."""

    present: list[Recording] = []  # noqa: RUF012 - those that are under way in this process

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[Callable[[], object]] = []

    def __enter__(self) -> Any:
        self.present.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self.present.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.steps.append(_Operator(func, *map(_its_memory, (args, kwargs or {}, made))).run)
        return made

    def replay(self) -> None:
        with torch.no_grad():
            for step in self.steps:
                step()


def _its_memory(tree: Any) -> Any:
    """The same memory, whatever becomes of these tensor objects: Transformer Engine takes some theirs away."""
    return tree_map_only(Tensor, torch.Tensor.detach, tree)


@dataclass(frozen=True)
class _Operator:
    """One call of an operator."""

    func: Any
    args: Any
    kwargs: Any
    made: Any

    def run(self) -> None:
        again = self.func(*self.args, **self.kwargs)
        if self.func.namespace == "c10d":
            for work in tree_leaves(again):
                if isinstance(work, torch.ScriptObject):
                    work.wait()  # type: ignore[attr-defined]
            return  # in place
        if any(one.alias_info is not None for one in self.func._schema.returns):
            return  # a view, or in place
        for then, now in zip(tree_leaves(self.made), tree_leaves(again), strict=True):
            if isinstance(then, Tensor):
                then.copy_(now)


class Graph:
    """One captured module for one micro-batch: its forward and its backward."""

    def __init__(self, module: Any, args: Sequence[Tensor], kwargs: dict[str, Tensor]) -> None:
        self.names, self.parameters = tuple(kwargs), [each for each in module.parameters() if each.requires_grad]
        self.inputs = [*args, *kwargs.values()]
        self.replays = 0
        with Recording() as self.forward:
            outputs = module(*args, **kwargs)
        self.single = isinstance(outputs, Tensor)
        self.outputs = [outputs] if self.single else list(outputs)
        given = [each for each in (*self.inputs, *self.parameters) if each.requires_grad]
        differentiable = [each for each in self.outputs if each.requires_grad]
        self.gradients_in = [torch.zeros_like(each) for each in differentiable]
        with Recording() as self.backward:
            found = torch.autograd.grad(differentiable, given, self.gradients_in, allow_unused=True)
        of_given = iter(found)
        self.gradients_out = [next(of_given) if each.requires_grad else None for each in (*self.inputs, *self.parameters)]
        self.needs = [each.requires_grad for each in self.outputs]
        self.outputs = [each.detach() for each in self.outputs]

    def __call__(self, *args: Tensor, **kwargs: Any) -> Any:
        user = [*args, *(kwargs[name] for name in self.names)]
        outputs = _Graphed.apply(self, *user, *self.parameters)  # type: ignore[no-untyped-call]
        return outputs[0] if self.single else outputs

    def reset(self) -> None:
        """Transformer Engine lets go of a graph so."""


class _Graphed(torch.autograd.Function):
    """Puts a graph's replays into autograd's graph, as Transformer Engine's `Graphed` does."""

    @staticmethod
    def forward(ctx: Any, graph: Graph, *given: Tensor) -> tuple[Tensor, ...]:
        for static, tensor in zip(graph.inputs, given, strict=False):
            if static.data_ptr() != tensor.data_ptr():
                static.detach().copy_(tensor)
        graph.replays += 1
        graph.forward.replay()
        ctx.graph = graph
        outputs = tuple(each.detach() for each in graph.outputs)
        ctx.mark_non_differentiable(*(each for each, needs in zip(outputs, graph.needs, strict=True) if not needs))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        graph = ctx.graph
        of_outputs = [each for each, needs in zip(gradients, graph.needs, strict=True) if needs]
        for static, gradient in zip(graph.gradients_in, of_outputs, strict=True):
            static.zero_() if gradient is None else static.copy_(gradient)
        graph.backward.replay()
        return None, *(None if each is None else each.detach().clone() for each in graph.gradients_out)


def make_graphed_callables(
    modules: tuple[Any, ...],
    sample_args: Sequence[tuple[Tensor, ...]],
    num_warmup_iters: int = 1,
    *,
    sample_kwargs: Sequence[dict[str, Tensor]] | None = None,
    _order: Sequence[int] = (),
    _num_layers_per_chunk: Sequence[int] | None = None,
    **settings: Any,
) -> tuple[Graph, ...]:
    """In the place of Transformer Engine's: a graph for each of these arguments, chunk by chunk, micro-batch by micro-batch.

    Every graph has memory of its own. (Transformer Engine shares what no graph in flight needs.)
    """
    layers = _num_layers_per_chunk or [len(modules)]
    found, first = [], 0
    microbatches = len(sample_args) // len(modules)
    for count in layers:
        chunk = modules[first : first + count]
        for number in range(microbatches):
            for at, module in enumerate(chunk):
                place = first * microbatches + number * count + at
                args = tuple(each.detach().clone().requires_grad_(each.requires_grad) for each in sample_args[place])
                kwargs = {name: each.clone() for name, each in (sample_kwargs[place] if sample_kwargs else {}).items()}
                for _ in range(num_warmup_iters):
                    _warm_up(module, args, kwargs)
                found.append(Graph(module, args, kwargs))
        first += count
    return tuple(found)


def _warm_up(module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    outputs = [each for each in tree_leaves(module(*args, **kwargs)) if each.requires_grad]
    given = [each for each in (*args, *module.parameters()) if each.requires_grad]
    torch.autograd.grad(outputs, given, [torch.zeros_like(each) for each in outputs], allow_unused=True)


class GraphSafeGenerator:
    """A generator of the device whose state can be exchanged for another one's: `torch.cuda.default_generators[i]`, or a state
    that it was given. The CPU's default generator has the numbers of the state that is in use."""

    in_use: Any = None
    """The content of the state that the device draws from."""

    def __init__(self, content: dict[str, Tensor] | None = None) -> None:
        self._content = content

    @property
    def _own(self) -> dict[str, Tensor]:
        return GraphSafeGenerator.in_use if self._content is None else self._content

    def graphsafe_get_state(self) -> GraphSafeGenerator:
        return GraphSafeGenerator(self._own)

    def clone_state(self) -> GraphSafeGenerator:
        return GraphSafeGenerator({"state": self.get_state()})

    def graphsafe_set_state(self, other: GraphSafeGenerator) -> GraphSafeGenerator:
        def exchange() -> None:
            GraphSafeGenerator.in_use["state"] = torch.default_generator.get_state()
            GraphSafeGenerator.in_use = other._own
            torch.default_generator.set_state(other._own["state"])

        exchange()
        for recording in Recording.present:
            recording.steps.append(exchange)
        return self

    def get_state(self) -> Tensor:
        return torch.default_generator.get_state() if self._own is GraphSafeGenerator.in_use else self._own["state"].clone()

    def set_state(self, state: Tensor) -> GraphSafeGenerator:
        if self._own is GraphSafeGenerator.in_use:
            torch.default_generator.set_state(state)
        self._own["state"] = state.clone()
        return self

    def manual_seed(self, seed: int) -> GraphSafeGenerator:
        other = torch.Generator()
        other.manual_seed(seed)
        return self.set_state(other.get_state())


class _AnyDevice(tuple[GraphSafeGenerator, ...]):
    def __getitem__(self, index: Any) -> Any:
        return tuple.__getitem__(self, 0)


Tracker = Literal["graph-safe", "te", "inference"]
"""Whose random numbers: Megatron's own tracker with graph-safe generators, Transformer Engine's (--te-rng-tracker), or none
beside the device's generator (--inference-rng-tracker, whose forks are empty)."""


@contextmanager
def stand_in_for_graphs(tracker: Tracker = "graph-safe") -> Iterator[None]:
    """Let Megatron capture, with such a tracker of random numbers. The usual one is back behind it."""
    from megatron.core.tensor_parallel import random

    with stand_in_for_captures() as put:
        put(random, "_CUDA_RNG_STATE_TRACKER", None)
        put(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
        random.initialize_rng_tracker(
            use_te_rng_tracker=tracker == "te",
            inference_rng_tracker=tracker == "inference",
            use_cudagraphable_rng=tracker != "te",
            force_reset=True,
        )
        yield


@contextmanager
def stand_in_for_captures() -> Iterator[Callable[[Any, str, Any], None]]:
    """What captures, and a device's generator whose state can be exchanged. Yields `put(owner, name, value)`, which is undone
    at the end."""
    from megatron.core.transformer import cuda_graphs

    with ExitStack() as undo:

        def put(owner: Any, name: str, value: Any) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name)) if hasattr(owner, name) else undo.callback(
                delattr, owner, name
            )
            setattr(owner, name, value)

        GraphSafeGenerator.in_use = {"state": torch.default_generator.get_state()}
        put(torch.cuda, "default_generators", _AnyDevice((GraphSafeGenerator(),)))
        put(torch.cuda.CUDAGraph, "register_generator_state", None)
        put(torch.cuda, "set_stream", ignore)
        put(torch.cuda, "graph_pool_handle", tuple)
        put(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        put(cuda_graphs, "make_graphed_callables", make_graphed_callables)
        yield put
