"""The first screen of `advise` and `plan`, by what it says at 80 and 120 columns."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_lynx.advise import Answer, answered, screen, verdict
from megatron_lynx.advise.neighbours import Neighbour
from megatron_lynx.advise.screen import _last_names, _run
from megatron_lynx.advise.today import Row, as_stock, asked_launch
from megatron_lynx.cost.step import StepRange
from megatron_lynx.cost.update import update_s
from megatron_lynx.errors import Infeasible, Problem
from megatron_lynx.launch_arguments import job_of, read_launch
from megatron_lynx.planner import Decision
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.stock import StockSetting, priced
from megatron_lynx.units import format_bytes
from tests.test_cli import lynx

pytestmark = pytest.mark.slow

LAUNCH = (
    "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 24 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu --disable-bias-linear "
    "--seq-length 8192 --max-position-embeddings 8192 --micro-batch-size 2 --global-batch-size 64 --bf16 --vocab-size 128256 "
    "--attention-dropout 0 --hidden-dropout 0 --tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer --normalization RMSNorm"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERTS = "--num-experts 8 --moe-grouped-gemm --moe-router-topk 2 --expert-model-parallel-size 4"


@cache
def answer(flags: str, memory_gib: float | None = None, *, near: bool = False) -> Answer:
    changes = {} if memory_gib is None else {"budget.memory_gib": memory_gib}
    asked = asked_launch(shlex.split(f"{LAUNCH} {flags}"), "a100-80g", changes=changes)
    return answered(asked.job, analytic_profile(asked.job), asked.reading, refused=asked.refused, near=near)


def printed(found: Answer, width: int) -> list[str]:
    page = io.StringIO()
    Console(file=page, width=width).print(screen(found))
    return page.getvalue().splitlines()


@pytest.fixture(scope="module")
def recomputing() -> Answer:
    """A launch that recomputes everything, with its neighbours."""
    return answer(FULL, near=True)


def test_an_optimizer_too_large_for_the_host_is_named_by_its_bytes() -> None:
    """The device's budget was said to be short, the host to be 0 bytes of 0, and the launch to be the best."""
    on_host = "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 1.0"
    asked = asked_launch(shlex.split(f"{LAUNCH} {on_host}"), "a100-80g", changes={"cluster.node.host_memory_gib": 100})
    found = answered(asked.job, analytic_profile(asked.job), asked.reading, refused=asked.refused, near=False)
    said = " ".join(" ".join(printed(found, 80)).split())
    assert said.startswith("By this count the host of a node holds ")
    assert "Nothing fits in the 100 GiB that hosts of a100-80g are taken to have" in said
    assert "found 0 B" not in said
    assert said.count("of the optimizer's state and its copies (8 devices)") == 3, "in the verdict, and of two stages"
    assert verdict(found).run is None


@pytest.mark.parametrize("width", [80, 120])
def test_a_launch_that_recomputes_is_answered_on_one_screen(recomputing: Answer, width: int) -> None:
    """Its flags were a reason to refuse it, and what it takes today was not said anywhere."""
    lines = printed(recomputing, width)
    assert len(lines) <= 26
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("Take another layout, --pipeline-model-parallel-size 1 ")
    said = " ".join(verdict(recomputing).text.split())
    assert "--micro-batch-size 4, under a plan: 35 % less than today" in said
    assert "In this layout: stock's best 22 to 24 % less than today; the plan 28 % less than today." in said
    stock = next(line for line in lines if line.startswith("stock"))
    assert stock.split()[:6] == ["stock", "best", "that", "fits:", "userbuffers", "7.64"]
    today = next(line for line in lines if line.startswith("today"))
    assert today.split()[:3] == ["today", "stock", "full"]
    assert today.split()[-2] == "1.00"
    plan = next(line for line in lines if line.startswith("plan"))
    assert float(plan.split()[-2]) < 1
    assert any(line.startswith("1 ") and "--" in line for line in lines), "the best neighbour, by the flags that change"
    assert "left out of the launch under a plan: --recompute-granularity" in "\n".join(lines)


def test_layouts_are_named_without_the_groups_of_a_frontends_names() -> None:
    named = "actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 +actor.override_transformer_config.num_layers=14"
    assert _last_names(named) == "expert_model_parallel_size=8 num_layers=14"
    assert _last_names("--micro-batch-size 4, 1.05 GiB") == "--micro-batch-size 4, 1.05 GiB"


def test_neighbours_are_ranked_and_fit(recomputing: Answer) -> None:
    seconds = [near.fastest.expected_s for near in recomputing.near]
    assert 1 <= len(seconds) <= 3
    assert seconds == sorted(seconds)
    assert all(row.memory_bytes <= near.job.memory_budget_bytes for near in recomputing.near for row in near.rows)


def test_a_neighbours_launch_line_is_its_layout(recomputing: Answer) -> None:
    """Read again, the line is the job that was planned."""
    for near in recomputing.near:
        command = recomputing.command(near)
        assert command is not None
        assert near.planned is not None
        assert command.endswith(" --lynx-plan plan.yaml")
        again = job_of(read_launch(shlex.split(command)), "a100-80g")
        assert again.batch == near.job.batch
        for name in ("tensor", "context", "pipeline", "sequence_parallel"):
            assert getattr(again.parallel, name) == getattr(near.job.parallel, name)
        counts = [len(stage.layers) for stage in near.planned.plan.stages]
        assert list(again.partition) == counts


def test_the_plan_is_also_held_against_the_launch_at_its_own_bytes(recomputing: Answer) -> None:
    launch, plan, within = recomputing.launch.row, recomputing.plan, recomputing.in_todays_bytes
    assert launch is not None
    assert plan is not None
    if plan.memory_bytes > launch.memory_bytes:
        assert within is None or within.memory_bytes <= launch.memory_bytes
    assert launch.memory_bytes < plan.memory_bytes <= recomputing.job.memory_budget_bytes


def test_where_stock_does_as_well_it_says_so() -> None:
    found = answer("--no-gradient-accumulation-fusion --micro-batch-size 1 --pipeline-model-parallel-size 1 --tp-comm-overlap")
    assert found.launch.setting == "stock none"
    assert verdict(found).run == "launch"
    assert verdict(found).text == "Keep your launch: nothing else that was found is over 1 % faster."


def test_where_no_plan_fits_it_says_what_the_launch_holds_and_what_would_fit() -> None:
    found = answer(FULL, 14)
    assert found.plan is None
    assert found.launch.row is not None
    assert verdict(found).run is None
    assert f"today holds {format_bytes(found.launch.row.memory_bytes)} of 14.00 GiB" in verdict(found).text
    assert "Nothing fits in 14.00 GiB: no plan, and no setting of stock Megatron's." in verdict(found).text
    assert "Within what today holds the plan takes 15 % less than today." in verdict(found).text
    assert any(each.startswith(("another layout", "more GPUs", "activations on the host")) for each in found.would_fit)
    assert "What would fit, nearest first:" in printed(found, 80)


def test_where_as_many_gpus_never_do_more_of_them_in_another_layout_are_named() -> None:
    """Parameters and gradients alone were too much in every layout looked at, and nothing was said at all."""
    found = answer("--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 1", 14)
    said = next(each for each in found.would_fit if each.startswith("more GPUs in another layout: "))
    gpus, changes = said.removeprefix("more GPUs in another layout: ").split(" in place of 16, ")
    assert int(gpus) in {32, 64, 128}
    assert "parallel." in changes


def test_a_plan_that_takes_as_long_is_not_said_to_take_0_percent_more() -> None:
    found = answer("--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --micro-batch-size 1", 20)
    assert found.plan is None
    assert found.in_todays_bytes is not None
    assert "0.0 %" not in verdict(found).text


def test_the_share_of_the_optimizer_that_would_do_has_a_plan_in_the_launch_with_its_flags() -> None:
    said = next(each for each in answer(FULL, 17).would_fit if each.startswith("optimizer on the host: "))
    assert " a step (gradients out " in said
    flags = said[said.index("--use-precision-aware-optimizer") :]
    assert flags.endswith("--optimizer-cpu-offload --optimizer-offload-fraction 0.5")
    found = answer(f"{FULL} {flags}", 17)
    assert found.plan is not None
    assert found.on_host is not None
    assert found.on_host.in_words in "\n".join(printed(found, 200))


def test_a_launch_that_fits_where_no_plan_does_is_kept() -> None:
    """Its least memory may lie below a plan's: `no plan fits` alone would have been no answer."""
    nothing = Infeasible("no plan fits", [Problem("memory of a device", "too much", "less")])
    found = replace(answer(FULL), without_copies=None, copies=None, error=nothing, near=(), stock=None)
    may = format_bytes(found.job.memory_budget_bytes)
    assert verdict(found).text == f"No plan fits in {may}. Keep your launch."


def test_a_launch_that_holds_too_much_by_our_count_is_told_so() -> None:
    found = answer("--micro-batch-size 4", 50)
    assert verdict(found).text.startswith("By this count today holds ")
    assert "too much. Run the plan: 6.5 % less than today, in 16.15 GiB less." in verdict(found).text


def test_what_no_plan_goes_with_is_named_beside_what_the_launch_takes() -> None:
    flex = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep"
    found = answer(f"{EXPERTS} {flex} --recompute-granularity selective --recompute-modules moe")
    said = verdict(found)
    assert said.text.startswith("No plan goes with --moe-flex-dispatcher-backend. Add --recompute-modules moe_act ")
    assert said.run == "stock"
    assert found.launch.setting == "stock moe"
    assert found.launch.row is not None
    assert any("needed deepep or hybridep" in line for line in printed(found, 120))


def test_overlapped_exchanges_have_one_price() -> None:
    """They had two, from what they take if nothing slows them down, as plans were priced, to what was measured on H100."""
    overlap = f"{EXPERTS} --moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm --delay-wgrad-compute"
    found = answer(f"{overlap} --num-layers-per-virtual-pipeline-stage 6")
    launch = found.launch
    assert launch.row is not None
    assert launch.row.step.is_known
    stock = as_stock(found.job)
    price = priced(stock, analytic_profile(stock), StockSetting(overlap=True, delayed=True))
    assert launch.row.step.least_s == pytest.approx(price.step_s + update_s(stock, analytic_profile(stock)))
    assert "exchanges overlapped, weight gradients delayed" in "\n".join(printed(found, 120))


def test_what_cannot_be_priced_is_planned_all_the_same() -> None:
    found = answer("--pipeline-model-parallel-size 1 --cpu-offloading-num-layers 4")
    assert found.plan is not None
    assert "is not known (--cpu-offloading-num-layers" in verdict(found).text


def test_advise_as_json_has_what_the_screen_says() -> None:
    result = lynx("advise", "--cluster", "a100-80g", "--json", "--", *shlex.split(f"{LAUNCH} {FULL} --use-mpi"))
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["launch"]["setting"] == "stock full"
    assert said["plan"]["step_s"] < said["launch"]["step_s"]
    assert said["plan"]["memory_bytes"] <= said["budget_bytes"]
    assert said["verdict"]["run"] == "neighbour"
    assert said["verdict"]["step_s"] == said["neighbours"][0]["plan"]["step_s"]
    assert said["stock"]["step_s"] <= said["stock"]["step_most_s"]
    assert said["stock"]["change"] == {
        "delete": ["--recompute-granularity", "--recompute-method", "--recompute-num-layers"],
        "add": ["--tp-comm-overlap"],
    }
    assert said["neighbours"][0]["launch"].startswith("torchrun --nproc-per-node 8 --nnodes 2 -m megatron_lynx.launch")
    assert said["understood"]["unknown"] == ["--use-mpi"]
    assert said["stages"], "what each stage does"
    assert result.stderr.count("warning: not known to Megatron 0.16 to 0.20") == 1


def test_plan_prints_the_same_screen_and_the_rest_where_asked(tmp_path: Path) -> None:
    """Its verdict came behind 150 lines."""
    words = ("plan", "--cluster", "a100-80g", "-o", tmp_path / "plan.yaml")
    launch = shlex.split(f"{LAUNCH} {FULL}")
    short = lynx(*words, "--", *launch).stdout
    assert short.startswith("Run the plan (delete --recompute-granularity ")
    assert len(short.splitlines()) <= 20
    assert "--recompute" not in short.splitlines()[-1]
    whole = lynx(*words, "--verbose", "--", *launch).stdout
    assert "model.ffn" in whole
    assert "stage 0: layers" in whole
    said = json.loads(lynx(*words, "--json", "--", *launch).stdout)
    assert said["plan"]["file"] == str(tmp_path / "plan.yaml")
    assert said["plan"]["step_s"] == pytest.approx(said["step_s"])
    assert 0 < said["update_s"] < said["step_s"]


def test_strict_refuses_what_megatron_does_not_know() -> None:
    result = lynx("advise", "--cluster", "a100-80g", "--strict", "--", *shlex.split(f"{LAUNCH} --use-mpi"))
    assert result.exit_code == 2
    assert "--use-mpi: found unknown" in result.stderr


def test_everything_that_is_wrong_is_said_at_once() -> None:
    """No cluster, and a launch that no stock Megatron would start."""
    words = shlex.split(f"{LAUNCH} --num-layers none --recompute-granularity full")
    result = lynx("advise", "--", *words)
    assert result.exit_code == 2
    for part in ("--cluster: found nothing", "h100-80g", "--num-layers: found none", "--recompute-method uniform (or block)"):
        assert part in result.stderr


def test_a_launch_file_and_the_cluster_of_its_header(tmp_path: Path) -> None:
    words = shlex.split(f"{LAUNCH} {FULL}")
    file = tmp_path / "mine.args"
    file.write_text("\n".join(["# mine", "# cluster: a100-80g", *words, ""]))
    result = lynx("estimate", "--launch-file", file, "--json")
    assert json.loads(result.stdout)["launch"]["setting"] == "stock full"
    assert "cluster a100-80g, as" in result.stderr
    assert lynx("estimate", "--launch-file", file, "--cluster", "h100-80g").stderr.count("as /") == 0
    both = lynx("estimate", "--launch-file", file, "--", *words)
    assert both.exit_code == 2
    assert "not both" in both.stderr


def test_estimate_says_first_what_the_launch_takes() -> None:
    result = lynx("estimate", "--cluster", "a100-80g", "--", *shlex.split(f"{LAUNCH} --recompute-granularity selective"))
    assert result.stdout.startswith("today (stock selective): ")


def test_a_comparison_begins_with_the_launch(tmp_path: Path) -> None:
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    words = ("compare", "--cluster", "a100-80g", "--simulate", "-o", tmp_path, "--json")
    rows = json.loads(lynx(*words, "--", *shlex.split(f"{LAUNCH} {block}")).stdout)["rows"]
    assert rows[0]["setting"] == "today: stock block 2"
    assert [row["setting"] for row in rows].count("stock block 2") == 0


def test_graphs_are_held_against_a_plan_as_if_the_host_took_no_time() -> None:
    """What a plan does not have is not counted against whoever has it."""
    small = "--micro-batch-size 1 --seq-length 512 --max-position-embeddings 512"
    plain, captured = (answer(f"{small} {graphs}") for graphs in ("", "--cuda-graph-impl local --te-rng-tracker"))
    assert plain.launch.row is not None
    assert captured.launch.row is not None
    assert captured.launch.row.expected_s < 0.95 * plain.launch.row.expected_s, "its host is slower than its device"
    assert captured.plan == plain.plan
    said = "\n".join(printed(captured, 120))
    assert "today's graphs: as if the host took no time" in said
    assert "left out of the launch under a plan: --cuda-graph-impl --te-rng-tracker" in said
    assert "stock none, graphs" in said


def taking(plan: Decision, step: StepRange, times: float) -> Decision:
    """The plan as if it took this many times a step."""
    other = replace(plan)
    vars(other)["step"] = StepRange(times * step.least_s, times * step.most_s)
    return other


@pytest.mark.parametrize(("share", "run"), [(1.02, "launch"), (0.995, "launch"), (0.98, "plan")])
def test_one_percent_of_todays_step_decides(share: float, run: str) -> None:
    """A plan that was 0.1 % faster was recommended, and a neighbour that was faster than a slower plan but not than today."""
    found = answer("--tp-comm-overlap")
    assert found.launch.row is not None
    assert found.without_copies is not None
    today = found.launch.row.step
    plan = taking(found.without_copies, today, share)
    slower = Neighbour(found.job, None, taking(plan, today, 1.01))
    said = verdict(replace(found, stock=None, without_copies=plan, in_todays_bytes=None, copies=None, near=(slower,)))
    assert said.run == run


@pytest.mark.parametrize(
    ("experts", "step_s", "said"), [(None, 0.985, True), (None, 0.95, False), ("some", 0.975, True), ("some", 0.93, False)]
)
def test_a_gain_within_the_error_of_ratios_says_so(experts: str | None, step_s: float, said: bool) -> None:
    before, row = (Row(StepRange.known(seconds), 1) for seconds in (1.0, step_s))
    launch, job = SimpleNamespace(row=before, written=True), SimpleNamespace(model=SimpleNamespace(experts=experts))
    text = _run(SimpleNamespace(launch=launch, job=job), "Run the plan", row)  # type: ignore[arg-type]
    assert ("within the error of such ratios" in text) is said


@pytest.mark.parametrize(("experts", "said"), [("some", True), (None, False)])
def test_a_layouts_gain_is_within_the_larger_error_of_layouts(experts: str | None, said: bool) -> None:
    """With experts, ratios of layouts are 21 % off, of settings 3 %."""
    before, row = (Row(StepRange.known(seconds), 1) for seconds in (1.0, 0.9))
    launch, job = SimpleNamespace(row=before, written=True), SimpleNamespace(model=SimpleNamespace(experts=experts))
    text = _run(SimpleNamespace(launch=launch, job=job), "Take TP4", row, layout=True)  # type: ignore[arg-type]
    assert ("within the error of such ratios" in text) is said
