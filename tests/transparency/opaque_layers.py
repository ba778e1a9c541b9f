"""On the ranks of a test: layers whose attention is Megatron's own gated delta net, with stand-ins for fla's kernels or, in a
deterministic job, in its own torch code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

from megatron_lynx.config.experts import Opaque
from megatron_lynx.config.job import Job
from megatron_lynx.errors import LynxError
from megatron_lynx.kinds.mamba.section import DeltaSizes
from megatron_lynx.plan.plan import Plan
from tests.instruments import delta_rule
from tests.transparency.trials import Outcome, Trial, compare_with_stock

SIZES = {"key_heads": 2, "key_size": 8, "value_heads": 4, "value_size": 8, "convolved": 4}


def delta_net_in(layers: list[int | str]) -> tuple[Opaque, ...]:
    """For a job whose layers of these numbers have it."""
    return (Opaque(kind="gated_delta_net", layers=tuple(layers), delta=DeltaSizes(**SIZES)),)


def own_attention_in(layers: list[int | str], hidden: int = 32) -> tuple[Opaque, ...]:
    """The same as a fork's attention, which plans keep whole."""
    sizes = DeltaSizes(**SIZES)
    matrices, convolved = hidden * (sizes.made + sizes.values), sizes.convolved * (2 * sizes.keys + sizes.values)
    parameters = matrices + convolved + 2 * sizes.value_heads + sizes.value_size
    return (Opaque(kind="own_attention", layers=tuple(layers), parameters=parameters, kept_bytes=2_000),)


@contextmanager
def delta_nets(job: Job) -> Iterator[None]:
    """The testbed's models have them where the job says so."""
    from megatron.core.ssm import gated_delta_net as theirs
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from megatron_lynx.testbed import tiny_models

    class OwnAttention(theirs.GatedDeltaNet):
        """A fork's."""

    classes = {"gated_delta_net": theirs.GatedDeltaNet, "own_attention": OwnAttention}
    modules = {number: classes.get(each.kind) for each in job.model.opaque for number in each.numbers(job.model.layers)}

    def block_spec(usual: Any, config: Any, vp_stage: int | None, te: bool) -> Any:
        with_delta_nets(config, job)
        variant = getattr(config, "experimental_attention_variant", None)  # specs of usual layers are made without one
        config.experimental_attention_variant = None
        block = usual(config, vp_stage, te)
        config.experimental_attention_variant = variant
        first = 1 + get_transformer_layer_offset(config, vp_stage)
        block.layer_specs = [deepcopy(spec) for spec in block.layer_specs]
        for number, spec in enumerate(block.layer_specs, start=first):
            if (module := modules.get(number)) is not None:
                linears = spec.submodules.self_attention.submodules
                parts = {"in_proj": linears.linear_qkv, "out_norm": tiny_models.Norm, "out_proj": linears.linear_proj}
                submodules = theirs.GatedDeltaNetSubmodules(**parts)
                spec.submodules.self_attention = ModuleSpec(module=module, submodules=submodules)
        return block

    with patch.object(tiny_models, "block_spec", partial(block_spec, tiny_models.block_spec)), delta_kernels():
        yield


def with_delta_nets(config: Any, job: Job) -> None:
    """Set the sizes of gated delta nets in Megatron's config."""
    for name, flag in (("num_key_heads", "key_heads"), ("num_value_heads", "value_heads")):
        setattr(config, f"linear_{name}", SIZES[flag])
    config.linear_key_head_dim, config.linear_value_head_dim = SIZES["key_size"], SIZES["value_size"]
    config.linear_conv_kernel_dim, config.deterministic_mode = SIZES["convolved"], job.model.deterministic


@contextmanager
def delta_kernels() -> Iterator[None]:
    """Megatron finds stand-ins of fla's kernels."""
    from megatron.core.ssm import gated_delta_net as theirs

    libraries = [getattr(theirs, name, theirs) for name in ("common", "gdn")]  # a package from 0.19 on
    with patch.object(libraries[0], "HAVE_FLA", True), ExitStack() as kernels:
        for library, name in product(libraries, ("causal_conv1d", "l2norm", "chunk_gated_delta_rule")):
            kernels.enter_context(patch.object(library, name, getattr(delta_rule, name), create=True))
        yield


def compare(rank: int, job: Job, plans: list[Plan], trial: Trial) -> list[Outcome]:
    """As `trials.compare_with_stock`, with gated delta nets in the job's opaque layers."""
    with delta_nets(job):
        return compare_with_stock(rank, job, plans, trial)


def refused(rank: int, job: Job, plan: Plan) -> str:
    """What installing says of a model as the job has it."""
    from megatron_lynx.apply.installation import install
    from tests.apply.on_ranks import trained

    with delta_nets(job):
        training = trained(job)
        try:
            install(training.chunks, plan)
        except LynxError as error:
            return str(error)
    return "installed"


def held_and_parameters(rank: int, job: Job, plan: Plan) -> tuple[list[str], int]:
    """What hooks hold, and how many parameters the model has."""
    from megatron_lynx.apply.installation import install
    from tests.apply.on_ranks import trained

    with delta_nets(job):
        training = trained(job)
        with install(training.chunks, plan) as installation:
            held = [hook.where for hook in installation.hooks]
        return held, sum(parameter.numel() for chunk in training.chunks for parameter in chunk.parameters())
