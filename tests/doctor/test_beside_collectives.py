"""What the doctor finds that shares a GPU with NCCL's kernels in windows."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest

from megatron_lynx.doctor import findings
from megatron_lynx.doctor.environment import ALL_STREAMS, Finding, beside_collectives
from megatron_lynx.environment import FORWARD_MARGIN, starts_as_one
from megatron_lynx.errors import ConfigError
from megatron_lynx.launch_arguments import read_launch
from megatron_lynx.plan import Plan, load_plan, save_plan
from megatron_lynx.plan.timetables import Group
from megatron_lynx.planner import uniform_plan
from megatron_lynx.testbed.tiny_jobs import tiny_job

PRIORITY = "priority of collectives"
WIDE = "--num-layers 8 --hidden-size 12288 --num-attention-heads 96 --bf16 --tensor-model-parallel-size 2"


def found_in(text: str, variables: dict[str, str] | None = None, plan: Plan | None = None) -> dict[str, Finding]:
    findings = beside_collectives(read_launch(shlex.split(text)), variables or {}, plan)
    return {finding.topic: finding for finding in findings}


@pytest.mark.parametrize(
    ("norm", "width", "as_one"),
    [
        ("layernorm", 8192, False),
        ("layernorm", 9216, True),  # no kernel of its own: that for 8192, with two blocks for each row
        ("layernorm", 10240, False),
        ("layernorm", 12288, True),
        ("rmsnorm", 8192, False),
        ("rmsnorm", 10240, True),
        ("rmsnorm", 16384, True),
    ],
)
def test_norms_that_start_on_all_multiprocessors_at_once(norm: Any, width: int, as_one: bool) -> None:
    assert starts_as_one(norm, width) is as_one


def test_layernorm_of_10240_in_32_bits_has_two_blocks_for_a_row() -> None:
    assert starts_as_one("layernorm", 10240, half_precision=False)


@pytest.mark.parametrize(
    ("flags", "variables", "level"),
    [
        (WIDE, {}, "note"),
        (WIDE, {FORWARD_MARGIN: "0"}, "note"),
        (WIDE, {FORWARD_MARGIN: "16"}, "good"),
        (f"{WIDE} --normalization RMSNorm", {}, "note"),
        (f"{WIDE} --transformer-impl local", {}, None),
        (f"{WIDE} --fp8-format e4m3 --fp8-recipe mxfp8", {}, None),
        (WIDE, {"NVTE_NORM_FWD_USE_CUDNN": "1"}, None),
        (WIDE.replace("12288", "8192"), {}, None),
        ("--num-layers 8", {}, None),
    ],
)
def test_margin_of_norms(flags: str, variables: dict[str, str], level: str | None) -> None:
    found = found_in(flags, variables).get(FORWARD_MARGIN)
    assert (None if found is None else found.level) == level


def te_plan(*items: str, **layout: Any) -> Plan:
    return uniform_plan(tiny_job("llama", implementation="transformer_engine", tensor=2, **layout), items)


def test_norms_that_a_plan_recomputes_in_windows_are_named() -> None:
    found = found_in(WIDE, plan=te_plan("input_layernorm", "activation"))[FORWARD_MARGIN]
    assert found.level == "slows"
    assert found.costs.startswith("the plan recomputes input_layernorm in windows: such a norm starts on all multiprocessors")
    assert f"export {FORWARD_MARGIN}=16" in found.todo
    assert "14% longer on 132 multiprocessors" in found.todo


@pytest.mark.parametrize(
    ("plan", "norms"),
    [
        ("gpt-175b-a100-80g", ["input_layernorm and pre_mlp_layernorm"]),
        ("gpt-175b-h800-80g", ["pre_mlp_layernorm"]),
        ("llama3-70b-h800-80g", []),
    ],
)
def test_a_plan_alone_tells_of_its_norms(plan: str, norms: list[str]) -> None:
    findings = list(beside_collectives(None, {}, load_plan(f"configs/plans/{plan}.yaml")))
    assert [finding.level for finding in findings] == ["slows"] * len(norms)
    assert [finding.costs.partition(" in windows")[0] for finding in findings] == [f"the plan recomputes {one}" for one in norms]


def test_a_plan_that_recomputes_no_norm_in_a_window_needs_no_margin() -> None:
    assert found_in(WIDE, plan=te_plan("activation"))[FORWARD_MARGIN].level == "good"


@pytest.mark.parametrize(
    ("flags", "variables", "level", "names"),
    [
        ("--tensor-model-parallel-size 2", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, None, ""),
        ("--tensor-model-parallel-size 2", {}, "slows", "tp"),
        ("--tensor-model-parallel-size 2", {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "slows", "tp"),
        ("--tensor-model-parallel-size 2", {ALL_STREAMS: "1"}, "good", ""),
        ("--tensor-model-parallel-size 2 --high-priority-stream-groups tp", {}, "good", "tp"),
        ("--tensor-model-parallel-size 2 --high-priority-stream-groups dp_cp", {}, "slows", "dp_cp tp"),
        ("--pipeline-model-parallel-size 4", {}, "slows", "pp"),
        ("--num-experts 8 --expert-model-parallel-size 4", {}, "slows", "ep"),
        ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", {}, None, ""),
        ("--tensor-model-parallel-size 2 --nccl-communicator-config-path nccl.yaml", {}, "note", ""),
        ("", {}, None, ""),
    ],
)
def test_priority_of_streams(flags: str, variables: dict[str, str], level: str | None, names: str) -> None:
    found = found_in(f"--num-layers 8 {flags}", variables).get(PRIORITY)
    assert (None if found is None else found.level) == level
    if level == "slows":
        assert found is not None
        assert found.todo == f"--high-priority-stream-groups {names}"


def test_only_groups_in_whose_windows_the_plan_works_are_named() -> None:
    launch = "--num-layers 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    found = found_in(launch, plan=te_plan("activation", pipeline=2))[PRIORITY]
    assert found.state.startswith("normal; the plan's windows: tp")
    nothing = te_plan("activation", pipeline=2).model_copy(update={"stages": te_plan(pipeline=2).stages})
    assert PRIORITY not in found_in(launch, plan=nothing)


def test_gradients_of_interleaved_schedules_travel_in_groups_that_no_flag_raises() -> None:
    """With chunks they are received in the group of all ranks, or in that of experts."""
    launch = "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
    found = found_in(f"{launch} --high-priority-stream-groups pp")[PRIORITY]
    assert (found.level, found.todo[: len(ALL_STREAMS) + 9]) == ("slows", f"export {ALL_STREAMS}=1")


def test_the_doctor_looks_into_the_plan(tmp_path: Path) -> None:
    save_plan(te_plan("input_layernorm"), tmp_path / "plan.yaml")
    found = {finding.topic: finding for finding in findings(shlex.split(WIDE), plan_file=tmp_path / "plan.yaml")}
    assert found[FORWARD_MARGIN].level == "slows"
    (tmp_path / "plan.yaml").write_text("version: 1")
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "plan.yaml"))):
        list(findings(shlex.split(WIDE), plan_file=tmp_path / "plan.yaml"))


def test_megatron_has_groups_of_these_names() -> None:
    from megatron.core import parallel_state

    source = inspect.getsource(parallel_state.initialize_model_parallel)
    assert [group for group in get_args(Group) if f'get_nccl_options("{group}"' not in source] == []
