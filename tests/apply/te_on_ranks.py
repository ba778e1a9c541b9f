"""What the tests of Transformer Engine's layers run on ranks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_lynx.anatomy import HALVES
from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import fp8_copies_bytes
from megatron_lynx.kinds.planning import half_tensors, planning_of
from megatron_lynx.plan.plan import Plan
from megatron_lynx.profiler.shape import LayerShape, weight_bytes

from .on_ranks import Attributes, one_step, trained


@dataclass
class Seen:
    """What a rank saw of an installation."""

    stale: list[str]
    """Functions that do not read as recorded."""
    claimed: list[str]
    changed: list[str]
    """Attributes that are other objects after the plan was removed."""


def held(rank: int, job: Job, plan: Plan) -> Seen:
    from megatron_lynx.apply.installation import install
    from megatron_lynx.apply.releases import present_te

    training = trained(job)
    one_step(training)
    attributes = Attributes(torch.nn.ModuleList(training.chunks))
    with install(training.chunks, plan) as installation:
        claimed = sorted(hook.where for hook in installation.hooks)
    release = present_te()
    stale = [problem.where for problem in (*release.stale(), *release.stale("fp8"))]
    return Seen(stale, claimed, attributes.changed())


def drawn_without_dropout(rank: int, job: Job, plan: Plan) -> tuple[list[list[int]], list[bool]]:
    """A step of stock, and one under a plan, where the core attention takes a number from the generator in every call, as
    Transformer Engine's fused attention does on a GPU: what each took, and whether the generators end where stock's do."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed.groups import seed_random_numbers

    training = trained(job)
    attention = type(training.chunks[0].decoder.layers[0].self_attention.core_attention.unfused_attention)
    forward, taken, ends = attention.forward, list[list[int]](), list[Any]()

    def drawing(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.attention_dropout_ctx():
            taken[-1].append(int(torch.randint(2**31, (1,))))
        return forward(self, *args, **kwargs)

    for present in (None, plan):
        taken.append([])
        seed_random_numbers(7)
        with ExitStack() as undo:
            if present is not None:
                undo.enter_context(install(training.chunks, present))
            undo.callback(setattr, attention, "forward", forward)
            attention.forward = drawing
            one_step(training)
        ends.append([torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()])
    return taken, [torch.equal(*both) for both in zip(*ends, strict=True)]


def adam(rank: int) -> str:
    """The full name of the Adam that Megatron's optimizer uses."""
    from megatron.core.optimizer import Adam

    return f"{Adam.__module__}.{Adam.__qualname__}"


def another_tracker(training: Any, undo: ExitStack) -> None:
    """A fork of it would draw numbers that no recomputation puts back."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    training.chunks[0].decoder.layers[0].self_attention.core_attention.rng_states_tracker = CudaRNGStatesTracker()


def saved_bytes(rank: int, job: Job) -> dict[str, int]:
    """What autograd holds behind each half of a layer, beside its input, parameters and what only the core attention makes: on a
    CPU it is unfused."""
    from tests.instruments.training import fp8_context

    layer = trained(job).chunks[0].module.decoder.layers[0]
    attention = layer.self_attention.core_attention
    original = attention.forward
    within: list[set[int]] = []

    def core(*args: Any, **kwargs: Any) -> Any:
        within.append({address(tensor) for tensor in args if isinstance(tensor, torch.Tensor)})
        try:
            return original(*args, **kwargs)
        finally:
            within.pop()

    attention.forward = core
    tokens = job.model.seq // (job.parallel.tensor if job.parallel.sequence_parallel else 1)
    found = {}
    for half, run in {"attention": layer._forward_attention, "mlp": layer._forward_mlp}.items():
        hidden = torch.randn(tokens, job.batch.micro, job.model.hidden, dtype=torch.bfloat16, requires_grad=True)
        blocks: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, blocks: dict[int, torch.UntypedStorage] = blocks) -> torch.Tensor:
            if not has_memory(tensor):
                return tensor
            if not within or address(tensor) in within[-1]:
                blocks[address(tensor)] = tensor.untyped_storage()  # held: an address means one block
            return tensor

        with fp8_context(job, layer), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(hidden, **({"attention_mask": None} if half == "attention" else {}))
        parameters = (each for each in layer.parameters() if not hasattr(each, "get_metadata"))
        own = {address(tensor) for tensor in (hidden, *parameters, *copies_of_weights(layer))}
        found[half] = sum(block.nbytes() for at, block in blocks.items() if at not in own)
    copies = {address(part): part.untyped_storage().nbytes() for part in copies_of_weights(layer, beside=True)}
    return found | {"copies": sum(copies.values())}


BY_ROWS = ("data", "rowwise_data")


def copies_of_weights(layer: Any, *, beside: bool = False) -> list[torch.Tensor]:
    """The memory of the copies in FP8 that its linears keep; and of weights that are in FP8 themselves (`beside`: all but their
    bytes by rows, which are the parameter)."""
    copies = [(copy, ()) for module in layer.modules() for copy in getattr(module, "_fp8_workspaces", {}).values()]
    held = [(each, BY_ROWS if beside else ()) for each in layer.parameters() if hasattr(each, "get_metadata")]
    parts = [part for copy, less in (*copies, *held) for name, part in copy.get_metadata().items() if name not in less]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is more than a wrapper around a weight's copy."""
    try:
        address(tensor)
    except RuntimeError:
        return False
    return True


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def predicted_bytes(job: Job) -> dict[str, int]:
    """The same by shape, with a GPU's kernels."""
    shape = replace(LayerShape.of(job), device="cuda")
    of_core = ("core_attention", ("core_attention",))
    found = {
        half: sum(
            tensor.bytes
            for tensor in half_tensors(shape, half)
            if tensor.saved_by and (tensor.made_by, tensor.saved_by) != of_core
        )
        for half in HALVES
    }
    if job.model.qk_norm and job.model.latent is None:  # the attention on a CPU copies values, and keys that heads share
        copied = 2 if job.model.kv_groups < job.model.heads else 1
        found["attention"] -= copied * shape.tokens * shape.key_width * job.model.element_bytes
    return found | {"copies": fp8_copies_bytes(job, 0) // job.model.layers}


def copies_of(job: Job, half: Any) -> int:
    """Of a half of a layer without experts, what is predicted of the copies that FP8 makes of its weights."""
    assert job.model.fp8_recipe is not None
    linears = planning_of(job.model.halves[half]).linears(LayerShape.of(job)).values()
    return sum(weight_bytes(job.model.fp8_recipe, one.made, one.taken, transposes=True) for one in linears)


def exchanges_of(rank: int, job: Job, plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """How many exchanges each userbuffer saw in one step of stock, and in one under a plan."""
    from transformer_engine.pytorch.module import base

    from megatron_lynx.apply.installation import install

    def exchanges() -> dict[str, int]:
        made = base._ub_communicators or {}
        return {name if isinstance(name, str) else name[0]: buffer.exchanges for name, buffer in made.items()}

    training = trained(job)
    one_step(training)
    before = exchanges()
    with install(training.chunks, plan):
        one_step(training)
    return before, {name: count - before[name] for name, count in exchanges().items()}
