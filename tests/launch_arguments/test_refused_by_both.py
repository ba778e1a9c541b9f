"""What installation refuses by Megatron's settings, `plan` refuses by its flags, or leaves out of the launch: nobody is given
a plan that cannot be installed.

The tables of `apply` are walked: each of their fields is set by a flag, which the launch is then given, or by none.
"""

from __future__ import annotations

import shlex

import pytest

from megatron_lynx.apply import features, fp8_refusals
from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.kinds.experts import running as experts
from megatron_lynx.kinds.latent import running as latent
from megatron_lynx.launch_arguments import Reading, job_of, read_launch
from megatron_lynx.launch_arguments.flag_kinds import NOT_UNDER_PLANS, REFUSED
from megatron_lynx.launch_arguments.flag_table import Flag, flag_table
from megatron_lynx.launch_arguments.today import REPLACED

from .test_reading import SMALL

BESIDE = {
    "dense": (*features.OFF, *features.ONE, "cuda_graph_impl"),
    "Transformer Engine": features.OFF_WITH_TE,
    "latent attention": latent.OFF,
    "experts": (*(name for name in features.OFF if name.startswith("moe_")), *experts.ONE),
    "fused exchanges": ("moe_flex_dispatcher_backend",),
    "FP8": fp8_refusals.OFF,
}
"""The fields that installation looks at, by what else the launch has."""
FLAGS = {
    "dense": "",
    "Transformer Engine": "--transformer-impl transformer_engine",
    "latent attention": "--multi-latent-attention",
    "experts": "--num-experts 8 --moe-token-dispatcher-type alltoall",
    "fused exchanges": "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex",
    "FP8": "--fp8-format hybrid",
}
SET_BY = {
    "cpu_offloading": "cpu_offloading_num_layers",
    "heterogeneous_block_specs": "heterogeneous_layers_config_path",
    "quant_recipe": "te_precision_config_file",
    "gtp_weight_remat_size": "tensor_parallel_num_weight_shards",
    "expert_gtp_weight_remat_size": "expert_tensor_parallel_num_weight_shards",
}
"""Fields that flags of another name set."""
NO_FLAG = {
    "num_microbatches_with_partial_activation_checkpoints",
    "enable_autocast",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
}
VALUES = {"moe_flex_dispatcher_backend": "ncclep", "cuda_graph_impl": "local", "fp8_quantizer_factory": "own.factory"}
"""What a flag is given that takes other words than these: a choice of Megatron's that is not its default, or 2."""

FIELDS = [
    pytest.param(name, beside, id=f"{name}, {beside}")
    for beside, names in BESIDE.items()
    for name in names
    if name not in NO_FLAG and not (beside == "dense" and name.startswith("moe_"))
]


def flag_of(field: str) -> Flag:
    forms = flag_table().of_name[SET_BY.get(field, field)]
    return max(forms, key=lambda flag: flag.releases[-1])


def words_of(flag: Flag) -> str:
    """The flag, switched on; nothing where it is on without a word."""
    if flag.default is True:
        return ""
    if flag.takes == 0:
        return flag.options[0]
    value = VALUES.get(flag.sets) or next((choice for choice in flag.choices if choice != flag.default), 2)
    return f"{flag.options[0]} {value}"


def reading_of(flags: str) -> Reading:
    return read_launch(shlex.split(f"{SMALL} --position-embedding-type rope {flags}"), gpus=8)


def problems_of(flags: str) -> tuple[Problem, ...]:
    """What `plan` says is wrong with a launch."""
    try:
        job_of(reading_of(flags), "h100-80g")
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(("field", "beside"), FIELDS)
def test_what_installation_refuses_is_refused_by_plan_or_left_out(field: str, beside: str) -> None:
    flag = flag_of(field)
    fused = "" if field == "apply_rope_fusion" else "--no-rope-fusion"
    said = f"{FLAGS[beside]} {fused} {words_of(flag)}"
    found = problems_of(said)
    if flag.sets in REPLACED:  # the launch under the plan is without it
        assert flag.options[0] in said
        assert flag.options[0] not in reading_of(said).changed({}).arguments
        return
    assert [problem for problem in found if problem.where in flag.options] != []


@pytest.mark.parametrize("beside", FLAGS)
def test_what_they_are_tried_beside_is_planned(beside: str) -> None:
    assert problems_of(f"{FLAGS[beside]} --no-rope-fusion") == ()


def test_every_other_field_has_no_flag() -> None:
    names = flag_table().of_name.keys()
    assert sorted(name for name in NO_FLAG if SET_BY.get(name, name) in names) == []


def test_only_what_installation_refuses_is_refused_under_plans_alone() -> None:
    """The rest of the launch can be estimated; flags whose cost is not known are refused anyway."""
    refused = {SET_BY.get(name, name) for names in BESIDE.values() for name in names}
    assert set(NOT_UNDER_PLANS) <= refused - set(REFUSED)
    for name in NOT_UNDER_PLANS:
        launch = shlex.split(f"{SMALL} {words_of(flag_of(name))}")
        assert read_launch(launch, gpus=8, planning=False).problems == ()
