"""What a launch does today is read as stock's setting; what Megatron would refuse of it is refused in the launch's own words."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from megatron_lynx.advise.today import as_stock
from megatron_lynx.cost.ends import logits_gradient_bytes
from megatron_lynx.errors import ConfigError
from megatron_lynx.launch_arguments import Reading, job_of, read_launch
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.shape import LayerShape
from megatron_lynx.stock import priced
from megatron_lynx.stock.setting import FULL, NONE, SELECTIVE, StockSetting
from tests.launch_arguments.test_reading import SMALL

FULL_FLAGS = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERTS = "--num-experts 8 --moe-token-dispatcher-type alltoall --moe-grouped-gemm --disable-bias-linear"
OVERLAPPED = f"{EXPERTS} --expert-model-parallel-size 8 --overlap-moe-expert-parallel-comm"
OFFLOADING = "--fine-grained-activation-offloading --offload-modules attn_proj core_attn"

HEAD = "--pipeline-model-parallel-size 2 --defer-embedding-wgrad-compute"
LOCAL, EXTERNAL = "--cuda-graph-impl local", "--external-cuda-graph"


def read(flags: str, *, planning: bool = True, strict: bool = False) -> Reading:
    return read_launch(shlex.split(f"torchrun --nproc-per-node 8 train.py {SMALL} {flags}"), planning=planning, strict=strict)


def refused(flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        job_of(read(flags), "a100-80g")
    return str(caught.value)


@pytest.mark.parametrize(
    ("flags", "setting"),
    [
        ("", NONE),
        ("--recompute-activations", SELECTIVE),
        (FULL_FLAGS, FULL),
        ("--recompute-granularity selective", SELECTIVE),
        ("--recompute-granularity selective --recompute-modules mlp layernorm", StockSetting(recompute=("layernorm", "mlp"))),
        (
            "--recompute-granularity=full --recompute-method=block --recompute-num-layers=3",
            StockSetting(method="block", layers=3),
        ),
        (f"{EXPERTS} --moe-layer-recompute", StockSetting(recompute=("core_attn", "moe"))),
        (OFFLOADING, StockSetting(offload=("core_attn", "attn_proj"))),
        (f"{OFFLOADING} --activation-offload-fraction 0.5", StockSetting(offload=("core_attn", "attn_proj"), fraction=0.5)),
        (f"{HEAD} --wgrad-deferral-limit 22", StockSetting(head=22)),
        (f"{FULL_FLAGS} {HEAD}", replace(FULL, head=0)),
        ("--wgrad-deferral-limit 22", NONE),
        ("--recompute-modules mlp", NONE),
        ("--offload-modules core_attn", NONE),
    ],
)
def test_flags_are_the_setting_of_today_and_no_reason_to_refuse_a_plan(flags: str, setting: StockSetting) -> None:
    """They were refused: of 25 public launches that recompute or offload none got a plan."""
    reading = read(flags)
    assert reading.today.setting == setting
    assert job_of(reading, "a100-80g").policy == "planned"
    if setting.flags:
        again = " ".join(setting.flags)
        again += " --pipeline-model-parallel-size 2" if setting.head is not None else ""
        assert read(again).today.setting == setting, "its own flags say the same"


def test_the_launch_under_a_plan_is_printed_without_them() -> None:
    flags = "--seed 5 --recompute-granularity selective --recompute-modules mlp layernorm --lr 1e-3 --use-mpi 'a b' 3"
    command = read(flags).under_plan("plan.yaml", ["--decoder-last-pipeline-num-layers 3"])
    assert "--recompute" not in command
    assert command.endswith("--seed 5 --lr 1e-3 --use-mpi 'a b' 3 --decoder-last-pipeline-num-layers 3 --lynx-plan plan.yaml")
    assert command.startswith("torchrun --nproc-per-node 8 -m megatron_lynx.launch train.py --num-layers 8 ")
    assert read_launch(shlex.split(command)).today.setting == NONE


def test_arguments_alone_are_told_what_to_drop() -> None:
    reading = read_launch(shlex.split(f"{SMALL} {FULL_FLAGS}"), gpus=8)
    answer = reading.under_plan("plan.yaml", [])
    dropped = "--recompute-granularity --recompute-method --recompute-num-layers"
    assert answer == f"add to the launch: --lynx-plan plan.yaml, and drop {dropped}"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--recompute-granularity full", "--recompute-method uniform (or block) beside it; Megatron stops here"),
        (f"{FULL_FLAGS} --recompute-activations", "--recompute-method: found uniform, needed no such flag with selective"),
        ("--recompute-granularity selective --recompute-modules moe_act", "moe_act is recomputed with --moe-grouped-gemm alone"),
        ("--recompute-granularity selective --recompute-modules attention", "0.20 does not recompute attention"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "with --multi-latent-attention alone"),
        ("--fine-grained-activation-offloading", "--offload-modules beside it"),
        ("--fine-grained-activation-offloading --offload-modules attn_proj", "attn_proj is offloaded with core_attn alone"),
        (f"{OFFLOADING} --transformer-impl local", "offloads from Transformer Engine's layers alone"),
        ("--delay-wgrad-compute", "with overlapped exchanges alone (--overlap-moe-expert-parallel-comm)"),
        (f"{EXPERTS} --overlap-moe-expert-parallel-comm", "there is no exchange to overlap"),
        (f"{OVERLAPPED} --pipeline-model-parallel-size 2 --expert-model-parallel-size 4", "pipeline of several chunks alone"),
        (f"{OVERLAPPED} {FULL_FLAGS}", "neither whole layers nor moe are recomputed beside overlapped exchanges"),
        ("--defer-embedding-wgrad-compute", "--pipeline-model-parallel-size 2 (or more)"),
        (f"{HEAD} --no-gradient-accumulation-fusion", "no --no-gradient-accumulation-fusion"),
        (f"{HEAD} --wgrad-deferral-limit -1", "0 (all micro-batches) or more"),
        (f"{LOCAL} {EXTERNAL}", "--cuda-graph-impl: found also --external-cuda-graph, needed one of them"),
        (f"--enable-cuda-graph {EXTERNAL}", "--enable-cuda-graph: found also --external-cuda-graph, needed one of them"),
    ],
)
def test_what_megatron_would_stop_at_is_said(flags: str, said: str) -> None:
    assert said in refused(flags)


def test_exchanges_that_overlap_are_today_too() -> None:
    reading = read(f"{OVERLAPPED} --delay-wgrad-compute")
    assert reading.today.setting == StockSetting(overlap=True, delayed=True)
    assert reading.today.name == "stock exchanges overlapped, weight gradients delayed"
    assert reading.problems == ()


def test_exchanges_stay_overlapped_where_a_plan_can_be_beside_them() -> None:
    """In FP8 Megatron frees what a single expert on a rank was handed."""
    beside = read(f"{OVERLAPPED} --delay-wgrad-compute --recompute-granularity selective --recompute-modules layernorm")
    command = beside.under_plan("plan.yaml", [])
    assert "--overlap-moe-expert-parallel-comm --delay-wgrad-compute" in command
    assert "--recompute" not in command
    assert job_of(beside, "a100-80g").model.moe_overlapped
    assert job_of(beside, "a100-80g").model.moe_delayed
    assert not job_of(read(OVERLAPPED), "a100-80g").model.moe_delayed
    cut = read(f"{OVERLAPPED} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1")
    assert job_of(cut, "a100-80g").model.moe_overlapped
    assert "--overlap-moe" in cut.under_plan("plan.yaml", [])
    fp8 = "--fp8-format hybrid --transformer-impl transformer_engine"
    assert job_of(read(f"{OVERLAPPED} {fp8}".replace("--num-experts 8", "--num-experts 16")), "h100-80g").model.moe_overlapped
    other = read(f"{OVERLAPPED} {fp8}")
    assert not job_of(other, "h100-80g").model.moe_overlapped
    assert "--overlap-moe" not in other.under_plan("plan.yaml", [])
    assert not job_of(read(OVERLAPPED, planning=False), "a100-80g").model.moe_overlapped, "priced as stock's setting"


def test_what_nobody_has_figures_for_is_planned_and_not_priced() -> None:
    today = read("--cpu-offloading-num-layers 4").today
    assert today.flags == ("--cpu-offloading-num-layers",)
    assert "Transformer Engine copies of whole layers" in today.not_priced[0]
    assert read(f"{OFFLOADING} --min-offloaded-tensor-size 10").today.not_priced


def test_flags_that_megatron_does_not_know_are_planned_unless_strict() -> None:
    """The words behind one, up to the next flag, are its own."""
    flags = "--use-mpi --qknorm-impl apex --trigger-path /a /b --lr-wsd-decay-style 1-sqrt"
    reading = read(flags)
    assert reading.given.unknown == ("--use-mpi", "--qknorm-impl apex", "--trigger-path /a /b", "--lr-wsd-decay-style 1-sqrt")
    assert reading.problems == ()
    strict = "\n".join(map(str, read(flags, strict=True).problems))
    assert "--use-mpi: found unknown, needed a flag of Megatron 0.16 to 0.20; drop it for planning" in strict
    assert "--lr-wsd-decay-style: found unknown, 1-sqrt, needed a value of Megatron" in strict


def test_a_value_that_matters_is_not_a_forks() -> None:
    assert "--position-embedding-type" in refused("--position-embedding-type relative2")
    assert refused("--optimizer galore").count("--optimizer") == 1, "once, with the reason"


def test_a_launch_that_offloads_is_planned_with_offloading() -> None:
    assert job_of(read(OFFLOADING), "a100-80g").offload_ratio == "auto"
    assert job_of(read(OFFLOADING, planning=False), "a100-80g").offload_ratio == 0, "priced as stock's setting"
    assert job_of(read(""), "a100-80g").offload_ratio == 0


def test_the_heads_deferred_weight_gradients_are_counted_on_the_last_stage_alone() -> None:
    """They were a reason to refuse a launch, although Megatron takes it: those of Swiss AI's have them."""
    flags = "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --use-distributed-optimizer"
    job = as_stock(job_of(read(flags), "a100-80g"))
    job = job.model_copy(update={"batch": job.batch.model_copy(update={"global_": 10 * job.replicas * job.batch.micro})})
    costs, shape = analytic_profile(job), LayerShape.of(job)
    plain = priced(job, costs, NONE)
    for at_most, held in ((4, 4), (0, 10), (22, 10)):
        late = priced(job, costs, StockSetting(head=at_most))
        more = [after.total - before.total for before, after in zip(plain.stages, late.stages, strict=True)]
        assert more == [0, held * (shape.input_bytes + logits_gradient_bytes(shape))]
        assert late.step.least_s < plain.step_s, "at best the end of the step hides them"
        assert late.step.most_s == plain.step_s
