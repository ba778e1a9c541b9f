"""`--lynx-check frames`: equal where all is well, also where backward is not deterministic; and what differs is named."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lynx.launch.check import difference
from megatron_lynx.launch.frames import Draw
from megatron_lynx.launch.launch import arguments_against
from megatron_lynx.testbed.ranks import RankPool
from tests.tiny_jobs import tiny_job
from tests.transparency.offloaded import offloading
from tests.transparency.plans import plan_for, recomputable
from tests.uniform import uniform_plan

from .frames_on_ranks import Checked, Trial, check_frames

Pools = Callable[[int], RankPool]
SUMMARY = re.compile(
    r"checked (\d+) frames in 3 steps(?: on \d ranks)?, of (all|\d+ of) (\d+) kinds of frames: (\d+) tensors "
    r"that were recomputed and (\d+) that were reloaded(?:, and (\d+) inputs that were gathered again,)? \(.+\) "
    r"are in every bit what their forward had saved"
)


def run(pool_of: Pools, job: Any, *trials: Trial) -> list[list[Checked]]:
    """By trial and rank."""
    return list(map(list, zip(*pool_of(job.gpus).run(check_frames, job, list(trials)), strict=True)))


def everything(job: Any, **more: Any) -> Trial:
    return Trial(plan_for(job, lambda layer: recomputable(job, gather=True), **more))


def clean(ranks: list[Checked], *, gathers: bool = False) -> tuple[int, int, int]:
    """Frames, and tensors that were recomputed and reloaded, of a run in which nothing differs."""
    assert {(rank.status, rank.said, rank.observer, rank.kept) for rank in ranks} == {(None, "", None, 0)}
    found = SUMMARY.fullmatch(ranks[0].summary or "")
    assert found, ranks[0].summary
    assert found[2] == "all"
    assert (found[6] is not None) == gathers
    return int(found[1]), int(found[4]), int(found[5])


@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2, "sequence_parallel": True}, {"pipeline": 2, "microbatches": 4}],
    ids=["TP2+SP, gathered once", "PP2, some on the host"],
)
def test_nothing_differs(pool_of: Pools, layout: dict[str, Any]) -> None:
    """Nor does a backward disturb it that gives other gradients each time. The check itself leaves gradients as they are."""
    job = tiny_job("gpt", **layout)
    trial = everything(job)
    if job.parallel.pipeline > 1:
        kept = plan_for(job, lambda layer: recomputable(job) if layer % 2 else ())
        trial = Trial(offloading(kept, 10**6, pace=10**4))
    unchecked, checked, restless = run(pool_of, job, replace(trial, steps=0), trial, replace(trial, restless=True))
    gathers = job.parallel.sequence_parallel
    frames, recomputed, reloaded = clean(checked, gathers=gathers)
    assert 3 * 2 * job.gpus < frames <= 3 * 4 * job.gpus, "at most four in each step, on each rank"
    assert recomputed > 0
    assert (reloaded > 0) == (job.parallel.pipeline > 1)
    assert clean(restless, gathers=gathers)[0] == frames
    for one, other in zip(unchecked, checked, strict=True):
        assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items())


def test_halves_of_experts_are_left_alone(pool_of: Pools) -> None:
    experts = {"count": 4, "per_token": 2, "ffn": 32, "layers": ("2-4",)}
    job = tiny_job("gpt", tensor=2, sequence_parallel=True, experts=experts, bias=False)
    (ranks,) = run(pool_of, job, everything(job))
    assert clean(ranks, gathers=True)[1] > 0


def test_a_gathered_input_whose_memory_is_used_again_is_named(pool_of: Pools) -> None:
    """The recomputation had read it, so that all it made was right; the weight gradient read what came there afterwards."""
    job = tiny_job("gpt", tensor=2, sequence_parallel=True)
    (ranks,) = run(pool_of, job, replace(everything(job), steps=6, fault="gather"))
    assert {rank.status for rank in ranks} == {1}
    assert re.search(
        r"  - step \d, layer 2, (attention half, linear_qkv|mlp half, linear_fc1), micro-batch \d \(its gathered input of "
        r"segment \d, float32 \[[\d, ]+\]\) on stage 0 \(rank \d\): found \d+ of \d+ values .+ 0 in what was "
        r"gathered and \S+ in what was saved",
        ranks[0].said,
    ), ranks[0].said


def test_another_mask_is_named(pool_of: Pools) -> None:
    """Of one layer of four: drawn in one of the steps, and the first tensor that is wrong is the mask itself."""
    job = tiny_job("gpt", tensor=2, attention_dropout=0.0)
    trial = replace(everything(job), steps=6, fault="mask")
    (ranks,) = run(pool_of, job, trial)
    assert {rank.status for rank in ranks} == {1}
    headline, problem = ranks[0].said.splitlines()
    assert re.search(r"--lynx-check frames: \d+ of \d+ tensors of backward are not what forward saved; the first", headline)
    found = re.match(
        r"  - step (\d), layer 2, (attention|mlp) half, (\w+), micro-batch \d \(tensor \d of segment \d, \w+ \[[\d, ]+\]\) on "
        r"stage 0 \(rank \d\): found \d+ of \d+ values that differ, most \S+ in what was recomputed and \S+ in what was saved, ",
        problem,
    )
    assert found, problem
    assert found[3] in ("self_attn_bda", "mlp_bda"), "the item that drops"
    assert [rank.said for rank in ranks[1:]] == [""]


def test_a_reload_that_was_not_waited_for_is_named(pool_of: Pools) -> None:
    job = tiny_job("gpt", pipeline=2, microbatches=4)
    trial = Trial(offloading(plan_for(job, lambda layer: ()), 10**6), fault="reload")
    (ranks,) = run(pool_of, job, trial)
    assert {rank.status for rank in ranks} == {1}
    assert re.search(
        r"  - step 1, layer \d, .+ on stage 0 \(rank 0\): found \d+ of \d+ values .+ what was reloaded and \S+ in what was saved",
        ranks[0].said,
    )


def test_a_recomputation_under_another_autocast_is_named(pool_of: Pools) -> None:
    """Backward fails on a matrix of another type before the step is over."""
    job = tiny_job("gpt", layers=1)
    ((alone,),) = run(pool_of, job, replace(everything(job), fault="autocast"))
    assert alone.status == 1
    assert "  - step 1, layer 1, mlp half, " in alone.said
    assert "needed the same bits" in alone.said


def test_all_kinds_are_drawn_and_never_more_than_allowed() -> None:
    draw, taken = Draw(seed=1), []
    kinds = [f"kind {number}" for number in range(10)]
    for step in range(6):
        draw.step_begins()
        drawn = [(kind, number) for number in range(8) for kind in kinds if draw.takes(kind)]
        assert len(drawn) == 4
        taken += drawn
        assert draw.kinds == (min(10, 4 * (step + 1)), 10)
    counts = Counter(kind for kind, _ in taken)
    assert set(counts.values()) == {2, 3}, "those that were drawn least come first"
    assert len({number for _, number in taken}) > 3, "not always the first of its kind"


def test_the_same_seed_draws_the_same_frames() -> None:
    def drawn(seed: int) -> list[tuple[int, int]]:
        draw, found = Draw(seed), []
        for step in range(4):
            draw.step_begins()
            found += [(step, number) for number in range(32) if draw.takes("one kind")]
        return found

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("saved", "got", "differ"),
    [
        (torch.tensor([float("nan")]), torch.tensor([float("nan")]), False),
        (torch.tensor([0.0]), torch.tensor([-0.0]), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), True),
        (torch.tensor(3), torch.tensor(3), False),
        (torch.empty(0), torch.empty(0), False),
        (torch.zeros(1).expand(4), torch.zeros(4), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), True),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn), True),
    ],
    ids=["NaN", "sign of zero", "mask", "a number", "nothing", "expanded", "another type", "FP8"],
)
def test_what_counts_as_different(saved: torch.Tensor, got: torch.Tensor, differ: bool) -> None:
    assert bool(difference(got, saved, ("what was recomputed", "what was saved"))) == differ


def test_frames_are_checked_without_flushes_too() -> None:
    plan = uniform_plan(tiny_job("gpt")).model_copy(update={"schedule": "double_buffered"})
    args = {"lynx_schedule": "double-buffered"}

    def refused(check: Any) -> bool:
        return "--lynx-check" in {problem.where for problem in arguments_against(plan, SimpleNamespace(lynx_check=check, **args))}

    assert [refused(check) for check in (2, "frames:2", None)] == [True, False, False]
