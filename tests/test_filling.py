"""The second filler in plans: faster or the same, within the same bytes, and only where it can run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from operator import attrgetter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.when_not import job_of, under
from megatron_lynx.anatomy.address import SEND_BACKWARD, is_forward
from megatron_lynx.config.job import Budget, Job
from megatron_lynx.config.loader import job_path, load_job
from megatron_lynx.config.parallel import Overlap
from megatron_lynx.cost.section import weight_gradient
from megatron_lynx.errors import Infeasible
from megatron_lynx.plan.facts import LayerRange
from megatron_lynx.plan.plan_file import dump_plan, load_plan
from megatron_lynx.planner import decide
from megatron_lynx.planner.filling import WORTH, Filler, Filling, Linear, Loads, Placed, Put, _waits, ways_of
from megatron_lynx.planner.summary import summary
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.rehearsal import rehearse
from megatron_lynx.stock import NONE, priced
from megatron_lynx.units import GIB, MIB
from tests.config.jobs import catalogued_job
from tests.profiler.made_up import made_up_profile
from tests.stock.parts import memory_of_stages
from tests.tiny_jobs import tiny_job


def deferring(job: Job, asked: str) -> Job:
    return job.model_copy(update={"overlap": Overlap(weight_gradients=asked)})


def between(job: Job, share: float) -> Job:
    """The job with the memory of stock full recomputation and this share of what that saves."""
    most, least = (max(each.total for each in memory_of_stages(under(job, policy))) / GIB for policy in ("none", "full"))
    return job.model_copy(update={"budget": Budget(memory_gib=least + share * (most - least))})


drawn = st.fixed_dictionaries(
    {
        "cluster": st.sampled_from(["h800-80g", "a100-80g", "a100-80g-pcie"]),
        "tensor": st.sampled_from([1, 2, 8]),
        "pipeline": st.sampled_from([1, 2, 4]),
        "microbatches": st.sampled_from([1, 3, 8]),
        "implementation": st.sampled_from(["local", "transformer_engine"]),
        "seq": st.just(2048),
    }
)


def test_in_cool_down_the_receive_takes_what_waits_for_a_forward():
    """No forward comes there. What waits for a window of its own backward needs no other."""
    assert _waits(("fwd.mlp.0",), receives=True) == ("fwd.mlp.0", "pipe.recv_backward")
    assert _waits(("fwd.mlp.0",), receives=False) == ("fwd.mlp.0",)
    assert _waits(("bwd.mlp.0",), receives=True) == ("bwd.mlp.0",)


@given(drawn, st.floats(0.05, 1.0))
@settings(max_examples=12, deadline=None)
@pytest.mark.slow
def test_never_slower_and_never_above_the_budget(change, share):
    job = between(job_of(change), share)
    profile = analytic_profile(job)
    try:
        without = decide(deferring(job, "none"), profile)
    except Infeasible:
        return
    found = decide(job, profile)
    assert found.simulation.step_s <= without.simulation.step_s
    assert max(memory.total for memory in found.memory) <= job.memory_budget_bytes
    filled = any(entry.defers for entry in found.plan.stages)
    assert filled == (found.simulation.step_s < without.simulation.step_s) == found.weight_gradients.startswith("deferred")
    for entry in found.plan.stages:
        seconds = entry.predicted.weight_gradient_hidden_s + entry.predicted.weight_gradient_exposed_s
        assert (seconds > 0) == entry.defers


def test_where_memory_does_not_bind_a_plan_is_faster_than_stock_without_recomputation(tmp_path):
    job = job_of({"cluster": "h800-80g", "tensor": 8, "pipeline": 1})
    roomy = job.model_copy(update={"budget": Budget(memory_gib=70.0)})
    profile = analytic_profile(job)
    found, stock_none_s = decide(roomy, profile), priced(job, profile, NONE).step_s
    without = decide(deferring(roomy, "none"), profile)
    assert all(rule.recomputed_in("attention") for rule in without.plan.stages[0].rules[:-1]), (
        "inputs gathered for recomputations spare waits"
    )
    assert found.simulation.step_s < 0.97 * without.simulation.step_s < 0.97 * stock_none_s
    (tmp_path / "plan.yaml").write_text(dump_plan(found.plan))
    read = load_plan(tmp_path / "plan.yaml")
    assert read == found.plan
    assert rehearse(read, profile).step_s == found.simulation.step_s


def test_memory_that_one_weight_gradient_takes_is_not_left_for_another():
    job = tiny_job("gpt", tensor=2)
    found = decide(job, made_up_profile(job))
    filler, (lowest, above) = found.filler, (LayerRange.of(range(layer, layer + 1)) for layer in (1, 2))
    rooms, through, peak_bytes = (
        filler._rooms(0, False),
        filler._through(stage=0, chunk=0, drains=False),
        found.simulation.memory(0).peak_bytes,
    )
    one, two = (dict.fromkeys(linears, (SEND_BACKWARD,)) for linears in (("linear_fc1",), ("linear_fc1", "linear_fc2")))
    without = Filling(rooms, found.simulation, through, peak_bytes)
    claimed = without._claimed(lowest, one)
    size_bytes = int(claimed.max())
    filling = Filling(rooms, found.simulation, through, peak_bytes - int(without._free[claimed > 0].min()) + size_bytes)
    assert not filling.holds(lowest, two)
    assert filling.holds(lowest, one)
    assert not filling.holds(lowest, two)
    assert not filling.holds(above, one)
    bound = filling.entry().weight_gradients
    assert bound.bytes == -(-2 * size_bytes // MIB) * MIB, "one more is there while it is put"
    assert filling.holds(lowest, {})
    assert filling.holds(lowest, one)


def test_none_are_deferred_where_none_can_be():
    tiny = tiny_job("gpt", tensor=2)
    profile = made_up_profile(tiny)
    testbed, asked = decide(tiny, profile), decide(deferring(tiny, "deferred"), profile)
    assert not any(entry.defers for entry in testbed.plan.stages)
    assert "overlap.weight_gradients: deferred" in testbed.weight_gradients
    assert any(entry.defers for entry in asked.plan.stages)
    assert asked.simulation.memory(0).peak_bytes <= testbed.simulation.memory(0).peak_bytes, "the least memory is wanted"
    assert summary(asked)["weight_gradients"] == asked.weight_gradients
    without = deferring(job_of({"cluster": "h800-80g"}), "none")
    found = decide(without, analytic_profile(without))
    assert "--no-gradient-accumulation-fusion" in found.weight_gradients
    assert not any(entry.defers for entry in found.plan.stages)


def test_old_jobs_keep_their_digest():
    job = tiny_job("gpt", tensor=2)
    assert deferring(job, "auto").digest == job.digest != deferring(job, "none").digest
    overlapped = job.model_copy(update={"overlap": Overlap(gradients=True)})
    assert overlapped.digest != overlapped.model_copy(update={"overlap": Overlap(gradients=True, weight_gradients="none")}).digest


def whole(name: str, seconds: float, beside: Put | None, puts: tuple[Put, ...]) -> Linear:
    return Linear(name, beside, puts, ((1, seconds),))


def test_what_gains_most_is_deferred_to_where_it_fits():
    """A wait of 2 s of which the column-parallel linear's own weight gradient hides half, one of 3 s, a forward's of 4 s: the
    row-parallel one's goes where it fits."""
    column = whole("linear_fc1", 1.0, Put(0, "bwd.mlp.2", 0), (Put(1, "bwd.attention.0", 1), Put(2, "fwd.mlp.0", 9)))
    row = whole("linear_fc2", 2.0, None, (Put(0, "bwd.mlp.2", 0), Put(1, "bwd.attention.0", 1), Put(2, "fwd.mlp.0", 9)))

    def found(*filled_s: float) -> list[Placed]:
        return ways_of(Loads((2.0, 3.0, 4.0), filled_s, 1.0), (row, column))

    assert found(0.0, 1.0, 0.0)[0].waits == {"linear_fc2": ("bwd.attention.0",)}
    first, *rest = found(0.0, 3.0, 0.0)
    assert first.waits == {"linear_fc2": ("bwd.mlp.2",)}, "1 s of it, beside the other's"
    assert min(rest, key=attrgetter("seconds")).waits == {"linear_fc2": ("fwd.mlp.0",)}
    assert first.seconds - min(each.seconds for each in rest) == pytest.approx(1.0)


SEVEN_WAITS = [*(f"bwd.attention.{number}" for number in range(5)), "fwd.attention.0", "fwd.mlp.0"]
LENGTHS_S = (0.5, 1.0, 2.0, 0.7, 0.1, 1.5, 0.4)


@pytest.mark.parametrize("filled_s", [(0.0,) * 7, (0.5, 0.0, 2.0, 0.0, 0.0, 0.3, 0.0), LENGTHS_S])
def test_packing_finds_nearly_the_best_of_all_assignments(filled_s: tuple[float, ...]) -> None:
    """Five linears, three of which hide a wait, and seven waits."""
    none = Loads(LENGTHS_S, filled_s, 1.1)
    puts = [Put(at, name, 20 if is_forward(name) else at) for at, name in enumerate(SEVEN_WAITS)]
    linears = [
        whole("linear_proj", 1.6, None, tuple(puts[1:])),
        *(whole(f"linear_{at}_up_proj", 0.9 - at / 5, Put(at, SEVEN_WAITS[at], 0), tuple(puts[at + 1 :])) for at in range(3)),
        whole("linear_kv_down_proj", 0.2, None, tuple(puts[5:])),
    ]
    found = ways_of(none, tuple(linears))
    assert not any(is_forward(wait) for waits in found[0].waits.values() for wait in waits)
    for way, forwards in ((found[0], False), (min(found, key=attrgetter("seconds")), True)):
        offered = [[None, *(put for put in each.places if forwards or not is_forward(put.name))] for each in linears]
        best = min(seconds_of(none, linears, chosen) for chosen in product(*offered))
        assert best - 1e-9 <= way.seconds <= 1.04 * best


def seconds_of(none: Loads, linears: Sequence[Linear], chosen: Sequence[Put | None]) -> float:
    """Of a layer with these places, a weight gradient's worth included; None: not deferred."""
    lengths, taken, alone = [*none.lengths_s], [*none.taken_s], 0.0
    for linear, put in zip(linears, chosen, strict=True):
        alone += linear.seconds if put is None else WORTH * linear.seconds
        if put is not None:
            taken[put.wait] += linear.seconds
        elif linear.beside is not None:
            lengths[linear.beside.wait] = max(0.0, lengths[linear.beside.wait] - linear.seconds)
    return alone + sum(length + max(0.0, work - length / none.interference) for length, work in zip(lengths, taken, strict=True))


def test_forwards_of_whichever_chunk_are_filled(monkeypatch):
    """Of stages with several chunks only backwards were filled; and the last stage, on which the loss counted what is held before
    backwards of all its chunks, often deferred nothing."""
    job = job_of({})
    job = between(job.model_copy(update={"parallel": job.parallel.model_copy(update={"layers_per_chunk": 8})}), 0.45)
    profile = analytic_profile(job)
    found = decide(job, profile)
    waits = {
        wait for entry in found.plan.stages for rule in entry.rules for each in rule.weight_gradients.values() for wait in each
    }
    assert any(wait.startswith("fwd.") for wait in waits)
    assert max(memory.total for memory in found.memory) <= job.memory_budget_bytes
    assert any(entry.defers for entry in found.plan.chunks_of(1))
    filled = Filler.filled
    monkeypatch.setattr(Filler, "filled", lambda *of, **how: filled(*of, **(how | {"forwards": False})))
    assert found.simulation.step_s < decide(job, profile).simulation.step_s


@pytest.mark.parametrize("whole", [False, True])
def test_exchanges_of_experts_are_filled(whole: bool) -> None:
    """Over two nodes tokens travel for long. What is in experts that run in one piece stays where it is."""
    parallel = {"tensor": 2, "sequence_parallel": True, "expert": 16, "expert_tensor": 1}
    job = catalogued_job("deepseek-v2-lite", gpus=32, batch=256, parallel=parallel, policy="planned")
    if whole:
        experts = job.model.experts.model_copy(update={"whole": True})
        job = job.model_copy(update={"model": job.model.model_copy(update={"experts": experts})})
    profile = analytic_profile(job)
    without, found = decide(deferring(job, "none"), profile), decide(job, profile)
    assert found.simulation.step_s < without.simulation.step_s
    filled = {
        (linear, wait)
        for entry in found.plan.stages
        for layer in set(entry.layers) - {1}  # which is dense
        for linear, waits in entry.rule_for(layer).weight_gradients.items()
        for wait in waits
    }
    in_exchanges = {linear for linear, wait in filled if ".mlp." in wait}
    assert bool(in_exchanges) != whole
    assert any(linear.startswith("shared_") for linear, _ in filled) != whole


def in_pieces(job: Job, *, asked: bool) -> Job:
    return job.model_copy(update={"overlap": job.overlap.model_copy(update={"weight_gradient_pieces": asked})})


def test_weight_gradients_longer_than_a_wait_are_cut() -> None:
    """On H800 a wait of Llama 3 70B is 0.7 ms, and the weight gradient of `linear_fc1` 3.4 ms."""
    job = load_job(job_path("llama3-70b-h800-80g"))
    profile = analytic_profile(job)
    whole, pieced = decide(in_pieces(job, asked=False), profile), decide(job, profile)
    assert pieced.simulation.step_s < 0.97 * whole.simulation.step_s
    assert max(memory.total for memory in pieced.memory) <= job.memory_budget_bytes
    rules = [rule for entry in pieced.plan.stages for rule in entry.rules]
    pieces = {linear: number for rule in rules for linear, number in rule.weight_gradient_pieces.items()}
    assert pieces.keys() <= {"linear_fc1", "linear_fc2"}
    assert pieces["linear_fc1"] > 1
    assert not any(rule.weight_gradient_pieces for entry in whole.plan.stages for rule in entry.rules)
    assert "deferred in pieces into waits" in pieced.weight_gradients
    assert rehearse(pieced.plan, profile, job=job).step_s == pieced.simulation.step_s


def test_no_rows_are_cut_in_fp8() -> None:
    """Its scales are of whole operands, so installation would refuse."""
    job = load_job(job_path("llama3-70b-h800-80g"))
    profile = analytic_profile(job)
    section = profile.shape.halves["mlp"]
    assert weight_gradient(profile, section, "linear_fc1").most_pieces > 1
    quantised = profile.model_copy(update={"shape": profile.shape.model_copy(update={"fp8": "delayed"})})
    assert weight_gradient(quantised, section, "linear_fc1").most_pieces == 1


def test_pieces_without_a_wait_run_where_the_whole_would_hide() -> None:
    """Of four pieces one has a wait of its own, three run beside the reduction that they hide anyway: as one of two pieces could
    not. Two and two are two pieces."""
    linear = Linear("linear_fc1", Put(0, "bwd.mlp.2", 0), (Put(1, "bwd.attention.0", 1),), ((1, 4.0), (2, 2.0), (4, 1.0)))
    for lengths_s, shares in (((3.0, 1.0), (3, 1)), ((2.0, 2.0), (1, 1)), ((4.0, 0.1), ())):
        found = ways_of(Loads(lengths_s, (0.0, 0.0), 1.0), (linear,))[0].waits.get("linear_fc1", ())
        assert tuple(Counter(sorted(found, reverse=True)).values()) == shares


def test_pieces_may_run_in_every_wait_of_a_forward() -> None:
    """A whole linear needs one forward at most, so four pieces shared one, and full waits of backward."""
    names = ["bwd.mlp.0", *(f"fwd.mlp.{number}" for number in range(4))]
    puts = tuple(Put(at, name, 20 if is_forward(name) else 0) for at, name in enumerate(names))
    linear = Linear("linear_fc2", None, puts, ((1, 4.0), (2, 2.0), (4, 1.0)))
    found = min(ways_of(Loads((1.0,) * 5, (1.0, 0.0, 0.0, 0.0, 0.0), 1.0), (linear,)), key=attrgetter("seconds"))
    assert sorted(found.waits["linear_fc2"]) == [f"fwd.mlp.{number}" for number in range(4)]
