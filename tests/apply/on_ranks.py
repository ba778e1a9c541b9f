"""What the tests of installing and refusing run on ranks. Megatron is imported inside, after the rank's stand-in is in place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from megatron_lynx.config.job import Job
from megatron_lynx.errors import LynxError, Problem
from megatron_lynx.free_memory import FreeMemory, Pot
from megatron_lynx.plan.plan import Plan

from ..transparency.trials import Trial, compare_with_stock

ABSENT = "absent"


class Attributes:
    """Every attribute of Megatron's and torch's modules and of a model's submodules, to be compared by identity."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._owners: dict[str, Any] = {
            name: module
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] in ("torch", "megatron") and isinstance(module, ModuleType)
        }
        if model is not None:
            self._owners |= {f"model.{name}": module for name, module in model.named_modules()}
        self._before = {name: dict(vars(owner)) for name, owner in self._owners.items()}

    def changed(self) -> list[str]:
        """Attributes that are another object now, appeared or are gone. What was only imported does not count, nor a tensor:
        Megatron keeps the present input on the model."""
        return sorted(
            f"{name}.{key}"
            for name, owner in self._owners.items()
            for key in self._before[name].keys() | vars(owner).keys()
            if vars(owner).get(key, ABSENT) is not self._before[name].get(key, ABSENT)
            and not isinstance(vars(owner).get(key), (ModuleType, torch.Tensor))
        )


def trained(job: Job, **model: Any) -> Any:
    """A model of the job, ready for a first step."""
    from megatron_lynx.testbed.groups import seed_random_numbers
    from tests.instruments.groups import initialise
    from tests.instruments.tiny_models import build_model
    from tests.instruments.training import Training

    initialise(job)
    training = Training(job, build_model(job, **model))
    seed_random_numbers(7)
    return training


# --- installing and removing ---------------------------------------------------------------------------------------------


def install_and_remove(rank: int, job: Job, plan: Plan) -> dict[str, list[str]]:
    """What differs from before: while installed, while lifted and behind it, after `remove()`, after the context, after an
    exception in the context."""
    from megatron_lynx.apply.installation import install

    training = trained(job)
    one_step(training)  # of stock, which itself leaves traces the first time
    attributes = Attributes(torch.nn.ModuleList(training.chunks))
    seen = {}
    installation = install(training.chunks, plan)
    seen["claimed"] = sorted(hook.where for hook in installation.hooks)
    seen["installed"] = attributes.changed()
    one_step(training)
    with installation.lifted():
        seen["lifted"] = attributes.changed()
        installation.engine.take_counts()
        one_step(training)
        seen["recorded while lifted"] = ["frames"] * installation.engine.take_counts().recorded
    seen["in force again"] = attributes.changed()
    one_step(training)
    seen["recorded again"] = ["frames"] * installation.engine.take_counts().recorded
    installation.remove()
    installation.remove()
    seen["removed"] = attributes.changed()
    with install(training.chunks if job.chunks > 1 else training.chunks[0], plan):
        one_step(training)
    seen["context left"] = attributes.changed()
    with suppress(KeyError), install(training.chunks, plan):
        raise KeyError
    seen["context failed"] = attributes.changed()
    return seen


def one_step(training: Any, number: int = 0) -> list[torch.Tensor]:
    from megatron_lynx.testbed.training import synthetic_batches

    losses: list[torch.Tensor] = training.step(synthetic_batches(training.job, number))
    return losses


def changed_by_import(rank: int) -> list[str]:
    """In a rank that has imported Megatron and nothing of this package but the testbed."""
    import megatron.core.pipeline_parallel.schedules
    import megatron.core.tensor_parallel.layers
    import megatron.core.transformer.transformer_layer  # noqa: F401

    import megatron_lynx

    with patch.dict(sys.modules), patch.dict(vars(megatron_lynx)):  # the rank lives on, with each module and its state once
        for name in [name for name in sys.modules if name.startswith(("megatron_lynx.apply", "megatron_lynx.runtime"))]:
            del sys.modules[name]
        attributes = Attributes()
        import megatron_lynx.apply.installation
        import megatron_lynx.runtime.engine

        return attributes.changed()


# --- refusals before training --------------------------------------------------------------------------------------------


@dataclass
class Refusal:
    """What came of an `install` or `remove` that should have been refused."""

    error: LynxError | None
    changed: list[str]
    """Attributes that the attempt left changed."""

    @property
    def places(self) -> list[str]:
        return [problem.where for problem in self.error.problems] if self.error else []


Spoil = Callable[[Any, ExitStack], Any]
"""Makes a run unfit for a plan; may return another model to install into. What it must undo goes onto the stack."""


def refused(rank: int, job: Job, plan: Plan, spoil: Spoil | None = None) -> Refusal:
    from megatron_lynx.apply.installation import install

    training = trained(job)
    with ExitStack() as undo:
        model = (spoil(training, undo) if spoil else None) or training.chunks
        attributes = Attributes(training.chunks[0])
        try:
            install(model, plan).remove()
        except LynxError as error:
            return Refusal(error, attributes.changed())
    return Refusal(None, [])


def set_config(training: Any, undo: ExitStack, **fields: Any) -> None:
    """Fields of the model's TransformerConfig, which must exist in this release."""
    config = training.chunks[0].config
    for name, value in fields.items():
        undo.enter_context(patch.object(config, name, value))


def older_torch_on_gpus(training: Any, undo: ExitStack, version: str, **variables: str) -> None:
    """Groups that say they are NCCL's, and a torch that says it is this one."""
    undo.enter_context(patch.object(torch, "__version__", version))
    undo.enter_context(patch.object(torch.distributed, "get_backend", lambda group: "nccl"))
    undo.enter_context(patch.dict(os.environ, variables))


def rewrite_function(training: Any, undo: ExitStack) -> None:
    """One function that hooks rely on reads differently, another one is gone."""
    from megatron.core.pipeline_parallel import p2p_communication
    from megatron.core.transformer.mlp import MLP

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    undo.enter_context(patch.object(MLP, "forward", forward))
    original = p2p_communication._batched_p2p_ops
    del p2p_communication._batched_p2p_ops
    undo.callback(setattr, p2p_communication, "_batched_p2p_ops", original)


def rewrite_router(training: Any, undo: ExitStack) -> None:
    from megatron.core.transformer.moe.router import TopKRouter

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    undo.enter_context(patch.object(TopKRouter, "forward", forward))


def reads_otherwise(training: Any, undo: ExitStack, what: str) -> None:
    """Code that matters only in runs that have this reads differently."""
    from megatron_lynx.apply.releases import Release

    problem = Problem(what, "other code", "the recorded one")
    undo.enter_context(patch.object(Release, "stale", lambda self, asked="": [problem] if asked == what else []))


def other_experts(training: Any, undo: ExitStack) -> None:
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    layers = training.chunks[0].decoder.layers
    layers[0].__class__ = MoETransformerLayer
    layers[2].mlp.__class__ = type("MyExperts", (type(layers[2].mlp),), {"__module__": "mine"})
    undo.enter_context(patch.object(training.chunks[0].config, "moe_token_dispatcher_type", "flex"))
    undo.enter_context(patch.object(training.chunks[0].config, "moe_flex_dispatcher_backend", "ncclep"))


def experts_of_my_own(training: Any, undo: ExitStack) -> None:
    """In all layers that have some: they run, but nobody has looked into them."""
    for layer in training.chunks[0].decoder.layers:
        if hasattr(layer.mlp, "experts"):
            second = layer.mlp.experts.local_experts[0].linear_fc2
            for part in (layer.mlp.experts, layer.mlp.token_dispatcher, second):
                part.__class__ = type("Mine", (type(part),), {"__module__": "mine"})
    undo.enter_context(patch.object(training.chunks[0].config, "moe_shared_expert_overlap", True))


def grouped_experts(training: Any, undo: ExitStack, environ: dict[str, str], **attributes: Any) -> Any:
    """The same model with Transformer Engine's grouped experts, made in this environment; `attributes`: of their linears."""
    undo.enter_context(patch.dict(os.environ, environ))
    chunks = trained(training.job, moe_grouped_gemm=True).chunks
    for chunk in chunks:
        for module in chunk.modules():
            if type(module).__name__.endswith("GroupedLinear"):
                vars(module).update(attributes)
    return chunks


def rename_release(training: Any, undo: ExitStack, version: str) -> None:
    import megatron.core

    undo.enter_context(patch.object(megatron.core, "__version__", version))


def context_parallel(training: Any, undo: ExitStack) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=2)


def groups_of_its_own(training: Any, undo: ExitStack) -> None:
    """Of the same ranks, and made by somebody else."""
    undo.enter_context(patch.object(training.chunks[0].pg_collection, "tp", torch.distributed.new_group([0, 1])))


def without_groups(training: Any, undo: ExitStack) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


class FullyShardedDataParallel(torch.nn.Module):
    """Called as Megatron's and torch's are."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def wrap_in_fsdp(training: Any, undo: ExitStack) -> Any:
    return FullyShardedDataParallel(training.chunks[0])


def twice(training: Any, undo: ExitStack) -> Any:
    return [training.chunks[0]] * 2


def without_decoder(training: Any, undo: ExitStack) -> Any:
    return torch.nn.Linear(2, 2)


def random_numbers_of_another_class(training: Any, undo: ExitStack) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    undo.callback(setattr, tracker, "__class__", type(tracker))
    tracker.__class__ = type("MyTracker", (type(tracker),), {"__module__": "mine"})


def a_tracker_of_its_own(training: Any, undo: ExitStack) -> None:
    """As Transformer Engine's attention has one when random numbers were seeded once more behind it."""
    for layer in training.chunks[0].decoder.layers:
        undo.enter_context(patch.object(layer.self_attention.core_attention, "rng_states_tracker", object(), create=True))


def other_classes(training: Any, undo: ExitStack) -> None:
    """A layer and a site of classes of somebody else."""
    layers = training.chunks[0].decoder.layers
    layers[0].__class__ = type("MyLayer", (type(layers[0]),), {"__module__": "mine"})
    layers[1].mlp.linear_fc1.__class__ = type("MyLinear", (type(layers[1].mlp.linear_fc1),), {"__module__": "mine"})


def other_halves(training: Any, undo: ExitStack) -> None:
    """Layers of Megatron's class whose halves are something else: experts, latent attention."""
    first, second = training.chunks[0].decoder.layers[:2]
    first.self_attention, second.mlp = torch.nn.Identity(), torch.nn.Identity()


def shares_of_hosts(rank: int, job: Job, plan: Plan, machines: list[str]) -> tuple[int, int]:
    """(what this rank may hold of its host, what its part of the training state takes), where each rank is on such a machine."""
    from megatron_lynx.apply import installation as host_share
    from megatron_lynx.apply.installation import install

    training = trained(job)
    free = FreeMemory((Pot("the machine", machines[rank], 10**9),))
    with patch.object(host_share, "free_memory", lambda: free), install(training.chunks, plan) as installation:
        parameters = sum(each.numel() for chunk in training.chunks for each in chunk.parameters())
        return installation.engine.offloader._limit.most_bytes, host_share.STATE_BYTES * parameters


def without_host_memory(training: Any, undo: ExitStack, unread: tuple[str, ...] = ()) -> None:
    from megatron_lynx.apply import installation as host_share

    free = FreeMemory((Pot("the machine", "a", 0),), unread)
    undo.enter_context(patch.object(host_share, "free_memory", lambda: free))


# --- refusals while a plan is in force -----------------------------------------------------------------------------------


def second_installation(rank: int, job: Job, plan: Plan) -> Refusal:
    """Refused, and the first one still holds everything."""
    from megatron_lynx.apply.installation import install

    training = trained(job)
    with install(training.chunks, plan):
        return refusal_of(partial(install, training.chunks, plan), Attributes(training.chunks[0]))


def replaced_on_top(rank: int, job: Job, plan: Plan) -> Refusal:
    """Somebody wrapped what we hold: removal touches nothing, and works when they are gone."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_lynx.apply.installation import install

    training = trained(job)
    clean = Attributes(training.chunks[0])
    installation = install(training.chunks, plan)
    with patch.object(schedules, "backward_step", lambda *args, **kwargs: None):
        refusal = refusal_of(installation.remove, Attributes(training.chunks[0]))
    installation.remove()
    refusal.changed += clean.changed()
    return refusal


def removal_mid_step(rank: int, job: Job, plan: Plan) -> list[Refusal]:
    """Removing within each micro-batch's forward step, before and behind the model, and within a layer; then between steps."""
    from megatron_lynx.apply.installation import install
    from megatron_lynx.testbed import training as loop

    training = trained(job)
    one_step(training)
    clean = Attributes(training.chunks[0])
    installation = install(training.chunks, plan)
    refusals: list[Refusal] = []

    def attempt(*_: Any) -> None:
        refusals.append(refusal_of(installation.remove, Attributes(training.chunks[0])))

    def forward_step(batches: Iterator[Any], model: torch.nn.Module) -> Any:
        attempt()
        result = original(batches, model)
        attempt()
        return result

    original = loop.forward_step
    layer_hook = training.chunks[0].decoder.layers[0].mlp.register_forward_pre_hook(attempt)
    with patch.object(loop, "forward_step", forward_step):
        one_step(training)
    layer_hook.remove()
    installation.remove()
    assert not clean.changed(), clean.changed()
    return refusals


def refusal_of(action: Callable[[], Any], attributes: Attributes) -> Refusal:
    try:
        action()
    except LynxError as error:
        return Refusal(error, attributes.changed())
    return Refusal(None, [])


def compare_with_stock_of_release(rank: int, job: Job, plans: list[Plan], trial: Trial | None = None) -> tuple[str, list[Any]]:
    """The transparency trial, and the release of megatron-core that it ran on."""
    from megatron.core import __version__

    return __version__, compare_with_stock(rank, job, plans, trial or Trial())


def tensors_left_on_layers(rank: int, job: Job, plan: Plan) -> list[str]:
    """What layers hold after a planned step beside their parameters, as an attribute or on an object that is one."""
    from megatron_lynx.apply.installation import install

    training = trained(job)
    with install(training.chunks, plan):
        one_step(training)
        layers = training.chunks[0].decoder.layers
        return [
            f"{number}.{name}"
            for number, layer in enumerate(layers)
            for name, value in vars(layer).items()
            if not name.startswith("_")
            and any(isinstance(held, torch.Tensor) for held in [value, *getattr(value, "__dict__", {}).values()])
        ]
