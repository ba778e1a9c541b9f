"""What installation refuses by Megatron's settings, `plan` refuses by its flags, or leaves out of the launch: nobody is given
a plan that cannot be installed.

The table is walked: each of its settings is set by a flag, which the launch is then given, or by none.
"""

from __future__ import annotations

import shlex

import pytest

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.launch_arguments import Reading, job_of, read_launch
from megatron_lynx.launch_arguments.given import Flag, flag_table
from megatron_lynx.limits import ARGUMENTS, CIRCUMSTANCES, LIMITS, Limit, limits

from .test_reading import SMALL

FLAGS = {
    "any": "",
    "plan": "",
    "te": "--transformer-impl transformer_engine",
    "latent": "--multi-latent-attention",
    "experts": "--num-experts 8 --moe-token-dispatcher-type alltoall",
    "flex": "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex",
    "fp8": "--fp8-format hybrid",
    "head": "",
    "two versions": "--pipeline-model-parallel-size 4 --global-batch-size 32 --transformer-impl local"
    " --lynx-schedule double-buffered",
}
"""What a launch has in each circumstance. Inside experts a plan is made as if nothing could be touched there."""
CHANGES = {"head": {"head.pieces": 4}}
"""What is asked of the planner there."""
EXPERTS = " --num-experts 8 --moe-token-dispatcher-type alltoall"
VALUES = {
    "moe_flex_dispatcher_backend": "ncclep",
    "experimental_attention_variant": "gdn2",
    "cuda_graph_impl": "local",
    "fp8_quantizer_factory": "own.factory",
    "rerun_mode": "report_stats",
}
"""What a flag is given that takes other words than these: a choice of Megatron's that is not its default, or 2."""

BESIDE = [
    pytest.param(limit, under, id=f"{limit.setting}, {under}")
    for limit in LIMITS
    for under in limit.under
    if under in FLAGS and limit.argument and limit.of in ARGUMENTS
]


def flag_of(name: str) -> Flag:
    return max(flag_table().of_name[name], key=lambda flag: flag.releases[-1])


def words_of(limit: Limit) -> str:
    """The flag, switched on."""
    flag = flag_of(limit.argument)
    if flag.takes == 0:
        return limit.option
    value = VALUES.get(flag.sets) or next((choice for choice in flag.choices if choice not in (flag.default, "none")), 2)
    return f"{limit.option} {' '.join([str(value)] * (flag.takes if isinstance(flag.takes, int) else 1))}"


def launch_of(limit: Limit, under: str) -> str:
    words = words_of(limit)
    needs_experts = limit.argument.startswith(("moe_", "expert_")) and "--num-experts" not in FLAGS[under]
    return f"{FLAGS[under]}{EXPERTS if needs_experts else ''} --no-rope-fusion {words}"


def reading_of(flags: str) -> Reading:
    return read_launch(shlex.split(f"{SMALL} --position-embedding-type rope {flags}"), gpus=8)


def problems_of(flags: str, changes: dict[str, object] | None = None) -> tuple[Problem, ...]:
    """What `plan` says is wrong with a launch."""
    try:
        job_of(reading_of(flags), "h100-80g", changes)
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(("limit", "under"), BESIDE)
def test_what_installation_refuses_is_refused_by_plan_or_left_out(limit: Limit, under: str) -> None:
    said = launch_of(limit, under)
    found = problems_of(said, CHANGES.get(under))
    flag = flag_of(limit.argument)
    if flag.sets in reading_of(said).today.replaced:  # the launch under the plan is without it
        assert limit.option in said
        assert limit.option not in reading_of(said).changed({}).arguments
        return
    reasons = {each.reason for each, _ in limits(["any", under], ARGUMENTS) if each.argument == limit.argument}
    refusals = [problem for problem in found if problem.where in flag.options and problem.needed.partition(": ")[2] in reasons]
    assert len(refusals) == 1, found


@pytest.mark.parametrize("under", FLAGS)
def test_what_they_are_tried_beside_is_planned(under: str) -> None:
    assert problems_of(f"{FLAGS[under]} --no-rope-fusion", CHANGES.get(under)) == ()


def test_what_is_refused_under_plans_alone_can_be_estimated() -> None:
    names = ("qk_clip", "log_max_attention_logit", "symmetric_ar_type", "inference_fuse_tp_communication")
    planned = [limit for limit in LIMITS if limit.setting in names and {"plan", "te"} & set(limit.under)]
    assert len(planned) == len(names)
    for limit in planned:
        launch = shlex.split(f"{SMALL} --transformer-impl transformer_engine {words_of(limit)}")
        assert read_launch(launch, gpus=8, planning=False).problems == ()
        assert read_launch(launch, gpus=8).problems != ()


def test_rows_name_recorded_flags() -> None:
    """Fields of another name say which argument sets them; fields that no flag sets say so."""
    wrong = []
    for limit in LIMITS:
        options = {option for flag in flag_table().of_name.get(limit.argument, ()) for option in flag.options}
        if limit.of in ARGUMENTS and limit.argument and limit.option not in options:
            wrong.append((limit.setting, limit.option))
    assert wrong == []
    assert {name for limit in LIMITS for name in limit.under} == CIRCUMSTANCES.keys()


def test_no_setting_is_refused_twice_in_one_circumstance() -> None:
    rows = [(limit.setting, limit.of, under) for limit in LIMITS for under in limit.under]
    assert len(rows) == len(set(rows))
