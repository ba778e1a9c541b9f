"""A plan has one step and one count of bytes, and so has each setting of stock Megatron: all commands print the same.

    plan ──> plan.yaml ──> explain, simulate, report, compare --simulate --plan
    advise, compare --simulate, estimate: of the same job or launch

`ONE_FIGURE_LAUNCHES=FOLDER:FOLDER` walks the launch files of folders (`*.args`), too.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lynx.advise.answer import WORTH
from megatron_lynx.config import load_job
from megatron_lynx.config.job import Policy
from megatron_lynx.estimate import estimate
from megatron_lynx.plan import load_plan
from megatron_lynx.report.contents import devices_of
from megatron_lynx.search import search
from megatron_lynx.yaml_file import write_yaml
from scripts.make_plans import launch_words
from tests.long import long
from tests.report.samples import tiles_in
from tests.test_budgets import jobs_on_gpus
from tests.test_cli import lynx
from tests.test_cli_launch import LAUNCH

pytestmark = pytest.mark.slow

ROUNDING = 1e-9
"""Plan files have twelve digits of a second."""


class Figure(NamedTuple):
    """What one command prints of one plan, or of one stock setting."""

    by: str
    step_s: float | None
    memory_bytes: int | None


def asked(*words: object) -> Any:
    """What a command answers with --json; None where it refuses."""
    result = lynx(*words)
    assert "Usage:" not in result.output, result.output
    return json.loads(result.stdout) if result.stdout.startswith("{") else None


@lru_cache(maxsize=1)
def advice(*words: object) -> Any:
    """`advise`, once for the plan and for the launch."""
    return asked("advise", "--json", *words)


def options_of(subject: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options before --, and the rest."""
    words = list(subject)
    cut = words.index("--") if "--" in words else len(words)
    return words[:cut], words[cut:]


PLANS_OWN = ("--inexact", "--offload-ratio")
"""Options that `compare` lacks: the plan says what became of them."""


def shared(options: Sequence[str]) -> list[str]:
    """The options that all commands take."""
    ours = {at for at, word in enumerate(options) if word in PLANS_OWN}
    return [word for at, word in enumerate(options) if at not in ours and at - 1 not in ours]


def of_the_plan(subject: Sequence[str], folder: Path) -> Iterator[Figure]:
    """The figures of the plan, or none where there is no plan."""
    options, launch = options_of(subject)
    path, page = folder / "plan.yaml", folder / "report.html"
    made = asked("plan", "-o", path, "--json", *options, *launch)
    if made is None or made.get("plan") is None:
        return
    yield Figure("plan", made["plan"]["step_s"], made["plan"]["memory_bytes"])
    yield Figure("plan, as read by programs", made["step_s"], made["memory_bytes"])
    stages = [stage["memory_bytes"]["total"] for stage in made["stages"]]
    yield Figure("plan, by stage", None, max(stages))
    predicted = [stage["predicted"] for stage in asked("explain", path, "--json")["stages"]]
    yield Figure("explain", predicted[0]["step_s"] + predicted[0]["update_s"], max(each["memory_bytes"] for each in predicted))
    simulated = asked("simulate", path, "--json")
    yield Figure("simulate", simulated["step_s"], simulated["memory_bytes"])
    assert lynx("report", path, "-o", page, "--budgets", 0).exit_code == 0
    yield from of_the_page(page.read_text(), path)
    beside = asked("compare", "--simulate", "--plan", path, "--json", "-o", folder / "compare", *shared(options), *launch)
    ours = next(row for row in beside["rows"] if row["ours"])
    yield Figure("compare --simulate", ours["step_s"], ours["device_bytes"])
    if "--inexact" not in options:
        advised = advice(*options, *launch)
        yield Figure("advise", advised["plan"]["step_s"], advised["plan"]["memory_bytes"])


def of_the_page(page: str, path: Path) -> Iterator[Figure]:
    tiles = tiles_in(page)
    memory = tiles["fullest device"][0]
    yield Figure("report, at its top", tiles["step"][0], None if memory is None else int(memory))
    yield Figure("report, by stage", None, max(device.bytes for device in devices_of(load_plan(path), {})))


def of_today(subject: Sequence[str], folder: Path) -> Iterator[Figure]:
    """The figures of a launch as it is written, where it is priced."""
    given, launch = options_of(subject)
    options = shared(given)
    estimated, advised = asked("estimate", "--json", *options, *launch), advice(*options, *launch)
    if estimated is None or advised is None or "launch" not in estimated or advised["launch"]["step_s"] is None:
        return
    known = advised["launch"].keys().isdisjoint(("step_at_best_s", "step_most_s"))  # else it is a range
    for name, found in (("estimate", estimated["launch"]), ("advise", advised["launch"])):
        yield Figure(name, found["step_s"] if known else None, found["memory_bytes"])
    beside = asked("compare", "--simulate", "--json", "-o", folder / "compare", *options, *launch)
    for row in () if beside is None else beside["rows"]:
        if row["setting"].startswith("today: "):
            yield Figure("compare --simulate", row["step_s"] if known else None, row["device_bytes"])


def differing(figures: Sequence[Figure]) -> list[str]:
    """What is printed of one thing by several commands, where it is not the same."""
    found = []
    for what in ("step_s", "memory_bytes"):
        values = {each.by: getattr(each, what) for each in figures if getattr(each, what) is not None}
        if values and max(values.values()) > min(values.values()) * (1 + ROUNDING):
            found.append(f"{what}: {values}")
    return found


def walk(subject: Sequence[str], folder: Path) -> list[Figure]:
    """The figures of the plan, all of them the same, as those of the launch are, to which a plan's own options are nothing."""
    plan, today = list(of_the_plan(subject, folder)), [] if "--inexact" in subject else list(of_today(subject, folder))
    assert differing(plan) == []
    assert differing(today) == []
    return plan


OF_EXPERTS = (
    "--disable-bias-linear --expert-tensor-parallel-size 1 --num-experts 8 --moe-router-topk 2 "
    "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
)
IN_FP8 = "--fp8-format hybrid"
PARTLY_ON_HOST = "--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5"
SMALL = LAUNCH.replace("hidden-size 4096", "hidden-size 1024").replace("attention-heads 32", "attention-heads 8")
"""Bound by the host, unless graphs are captured."""
GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn --te-rng-tracker"
CHUNKS = LAUNCH.replace(
    "pipeline-model-parallel-size 2", "pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1"
)

SUBJECTS = {
    "dense": (["--cluster", "a100-80g"], LAUNCH),
    "dense, tight": (["--cluster", "a100-80g", "--memory-gib", "9"], f"{LAUNCH} --overlap-grad-reduce"),
    "chunks, copies": (["--cluster", "a100-80g", "--memory-gib", "8", "--offload-ratio", "auto"], CHUNKS),
    "experts": (["--cluster", "h100-80g"], f"{LAUNCH} {OF_EXPERTS}"),
    "optimizer on the host": (["--cluster", "h100-80g"], f"{LAUNCH} {PARTLY_ON_HOST}"),
    "FP8, recomputed today": (
        ["--cluster", "h100-80g", "--memory-gib", "8"],
        f"{LAUNCH} {IN_FP8} --recompute-activations",
    ),
    "graphs, recomputed today": (["--cluster", "h100-80g"], f"{SMALL} {GRAPHS} --recompute-activations"),
    "head in pieces": (["--cluster", "a100-80g", "--memory-gib", "13", "--inexact", "head"], f"{LAUNCH} --vocab-size 256000"),
}


IN_OTHERS = ("dense", "graphs, recomputed today")
"""Whose every part is in another subject."""


@pytest.mark.parametrize("name", [*(name for name in SUBJECTS if name not in IN_OTHERS), *long(*IN_OTHERS)])
def test_a_launch_has_one_figure_in_all_commands(name: str, tmp_path: Path) -> None:
    options, launch = SUBJECTS[name]
    assert walk([*options, "--", *shlex.split(launch)], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama3_8b", "gpt_13b", "llama3_70b"])
def test_a_ready_launch_has_one_figure_in_all_commands(name: str, tmp_path: Path) -> None:
    assert walk(["--cluster", "h100-80g", "--", *launch_words(name, "h100-80g", "none")], tmp_path)


def test_neighbours_have_the_figures_of_their_launch_lines(tmp_path: Path) -> None:
    """Stock's step was that of equal stages, under flags that place layers as the plan does; chunks stayed in the launch. `plan`
    prefers an equally fast plan in the bytes of the launch line, which is today's launch to it."""
    options, launch = ["--cluster", "h100-80g"], shlex.split(f"{CHUNKS} --vocab-size 256000 --num-layers 32")
    neighbours = asked("advise", "--json", *options, "--", *launch)["neighbours"]
    assert any(near["layout"] != near["stock_layout"] for near in neighbours)
    otherwise_placed = sorted(neighbours, key=lambda near: near["layout"] == near["stock_layout"])
    for near in otherwise_placed[:2]:
        changed, deleted = near["stock_layout"]["add"], near["stock_layout"]["delete"]
        of_stock = [*options, "--", *without(launch, deleted), *shlex.split(" ".join(changed))]
        of_plan = [*options, "--offload-ratio", near["plan"]["offload_ratio"], "--", *shlex.split(near["launch"])]
        for what, line in (("stock", of_stock), ("plan", of_plan)):
            answer = asked("plan", "-o", tmp_path / "plan.yaml", "--json", *line)
            own, in_todays_bytes = answer[what], answer["plan_in_todays_bytes"]
            if what == "plan" and in_todays_bytes is not None and own["step_s"] == in_todays_bytes["step_s"]:
                assert own["memory_bytes"] <= near["plan"]["memory_bytes"]
                assert near["plan"]["step_s"] <= own["step_s"] <= (1 + WORTH) * near["plan"]["step_s"]
                continue
            figures = [Figure(by, each["step_s"], each["memory_bytes"]) for by, each in (("advise", near[what]), ("plan", own))]
            assert differing(figures) == []


def without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words without flags that take a value."""
    lost = {at for at, word in enumerate(words) if word in flags}
    return [word for at, word in enumerate(words) if at not in lost and at - 1 not in lost]


def launch_files() -> list[Path]:
    folders = filter(None, os.environ.get("ONE_FIGURE_LAUNCHES", "").split(os.pathsep))
    return sorted(file for folder in folders for file in Path(folder).glob("*.args"))


@pytest.mark.parametrize("file", launch_files(), ids=lambda file: file.stem)
def test_a_launch_file_has_one_figure_in_all_commands(file: Path, tmp_path: Path) -> None:
    walk(["--launch-file", str(file)], tmp_path)


def test_a_job_has_one_figure_in_all_commands(tmp_path: Path) -> None:
    walk_job("jobs/llama-7b-a100-80g", tmp_path)


def walk_job(job: str, folder: Path) -> None:
    """A job of policy planned: what `estimate` says of it is its plan's, too."""
    figures = walk([job], folder)
    if figures:
        estimated = asked("estimate", job, "--json")
        held = max(stage["memory_bytes"]["total"] for stage in estimated["stages"])
        assert differing([*figures, Figure("estimate", estimated["step_s"], held)]) == []


@pytest.mark.parametrize("policy", ["planned", "selective"])
def test_a_search_shows_the_figures_that_other_commands_have(policy: Policy) -> None:
    """Plans were rehearsed with fewer micro-batches, and without weight gradients in waits."""
    job = load_job("jobs/llama3-8b-a100-80g")
    found = search(job, 16, top=3, policies=(policy,))
    assert found.candidates
    for number, candidate in enumerate(found.candidates):
        answer = estimate(candidate.job)
        assert answer.step is not None
        shown = Figure(f"search, row {number}", candidate.step_s, candidate.memory_bytes)
        own = Figure("estimate", answer.step.most_s, max(memory.total for memory in answer.stages))
        assert differing([shown, own]) == []


@pytest.mark.long
@settings(max_examples=6, deadline=None)
@given(job=jobs_on_gpus(), memory_gib=st.floats(30, 70))
def test_drawn_jobs_have_one_figure_in_all_commands(
    tmp_path_factory: pytest.TempPathFactory, job: Any, memory_gib: float
) -> None:
    """As the one job of `make test`, with budgets that make plans recompute, chunks and copies."""
    folder = tmp_path_factory.mktemp("drawn")
    budget = job.budget.model_copy(update={"memory_gib": memory_gib})
    data = job.model_copy(update={"budget": budget}).model_dump(mode="json", by_alias=True, exclude_unset=True)
    (folder / "job.yaml").write_text(write_yaml(data))
    walk_job(str(folder / "job.yaml"), folder)
