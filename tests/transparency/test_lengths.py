"""Micro-batches of changing length and number, and packed ones: every bit is stock's, whatever the plan was made for."""

from __future__ import annotations

import pytest

from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..long import long
from ..te_releases import pool_with
from .checkpoints import checkpointed
from .lengths import Step, changing_lengths
from .offloaded import offloading

SINGLE = (Step(((16,), (8,))), Step(((4,), (12,), (16,), (8,), (4,))), Step(((12,),)))
"""Changing lengths and numbers of micro-batches; every length divides among the ranks of a sequence."""
PACKED = (Step(((9, 7), (3, 5, 4)), packed=True), Step(((4,), (2, 2, 8, 4), (11, 1)), packed=True))

LAYOUTS = {
    "tensor 2, sequence parallel": {"tensor": 2, "sequence_parallel": True},
    "pipeline 2": {"pipeline": 2, "microbatches": 4},
    "context 2": {"context": 2, "context_exchange": "all_gather"},
    "experts": {
        "expert": 2,
        "tensor": 2,
        "sequence_parallel": True,
        "experts": {"count": 4, "per_token": 2, "ffn": 32, "layers": ("1-4",)},
        "expert_tensor": 1,
    },
    "pipeline 2, two chunks": {"pipeline": 2, "layers_per_chunk": 1, "microbatches": 4},
}


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:4], *long("pipeline 2, two chunks")])
def test_every_bit_is_stocks_whatever_comes(pool_of, layout):
    job = tiny_job(**LAYOUTS[layout])
    steps = SINGLE if layout != "pipeline 2, two chunks" else (SINGLE[0], Step(((4,), (12,), (16,), (8,))))
    for differing, seen in pool_of(job.gpus).run(changing_lengths, job, uniform_plan(job, gather="once"), steps, {}):
        assert differing == []
        assert (seen.frames_left, seen.said) == (0, [])
        passes = [len(step.lengths) for step in steps]
        own = 2 * sum(len(job.layers_of(0, chunk)) for chunk in range(job.chunks))
        assert [counts.recomputed for counts in seen.counts] == [own * count for count in passes]


@pytest.mark.parametrize("layout", [*list(LAYOUTS)[:3], *long("experts", "pipeline 2, two chunks")])
def test_what_came_is_counted_once_a_micro_batch(pool_of, layout):
    """On every rank, whatever of a sequence it has; checkpoints, whose halves run again, do not count again."""
    job = tiny_job(**LAYOUTS[layout])
    steps = (Step(((16,), (8,), (4,), (12,))),)
    plan = checkpointed(uniform_plan(job), "layer")
    shards = job.parallel.context * (job.parallel.tensor if job.parallel.sequence_parallel else 1)
    for differing, seen in pool_of(job.gpus).run(changing_lengths, job, plan, steps, {}):
        assert differing == []
        micro, squares = job.batch.micro, sum(length**2 for (length,) in steps[0].lengths)
        assert seen.met == [(4, micro * 40 // shards, micro * squares)]


def test_recorded_graphs_do_not_pile_up(pool_of):
    """Each new length would be recorded anew, and sixteen of them forgot all."""
    job = tiny_job(tensor=2, layers=2)
    steps = [Step(tuple((length,) for length in range(1, 17)))] * 2
    for differing, seen in pool_of(2).run(changing_lengths, job, uniform_plan(job), steps, {}):
        assert differing == []
        assert seen.graphs == 5, "of lengths 1, 2, up to 4, up to 8, up to 16"


@pytest.mark.parametrize("layout", ["tensor 2, sequence parallel", *long("pipeline 2")])
def test_more_tokens_than_the_plan_holds_for_are_kept(pool_of, layout):
    """And said once; the micro-batches beside them are recomputed as planned."""
    job = tiny_job(**LAYOUTS[layout])
    plan = uniform_plan(job.model_copy(update={"model": job.model.model_copy(update={"seq": 8})}), gather="once")
    steps = (Step(((8,), (16,))), Step(((16,), (4,))))
    for differing, seen in pool_of(2).run(changing_lengths, job, plan, steps, {}):
        assert (differing, seen.frames_left) == ([], 0)
        assert [counts.recomputed for counts in seen.counts] == [2 * job.layers_on(0)] * 2, "of one micro-batch in each step"
        [said] = seen.said
        assert "the plan holds for at most" in said


def test_what_goes_to_the_host_settles(pool_of):
    """Blocks of host memory grow to what the longest needs, and are not made anew for every other length."""
    job = tiny_job(pipeline=2, microbatches=4)
    steps = [Step(((16,), (8,), (12,), (4,)))] * 3
    first, _ = pool_of(2).run(changing_lengths, job, offloading(uniform_plan(job, (), windows=False), 20_000), steps, {})
    differing, seen = first
    assert (differing, seen.frames_left) == ([], 0)
    assert all(counts.offloaded_bytes == counts.reloaded_bytes > 0 for counts in seen.counts)
    assert seen.counts[1].host_bytes == seen.counts[2].host_bytes


@pytest.fixture(scope="module")
def te_pool_of():
    pools = {}
    yield lambda ranks: pools.setdefault(ranks, pool_with("2.20", ranks, core="0.19"))
    for pool in pools.values():
        pool.close()


PACKING = {name: LAYOUTS[name] for name in ("context 2", "experts", "tensor 2, sequence parallel", "pipeline 2")}
CUT = (Step(((8, 4), (4, 12)), packed=True), Step(((4,), (8, 4, 4), (12,)), packed=True))
"""As `PACKED`, of lengths that ranks can share."""


@pytest.mark.parametrize("layout", [*list(PACKING)[:2], *long(*list(PACKING)[2:])])
def test_packed_sequences(te_pool_of, layout):
    """Between context-parallel ranks with a stand-in for Transformer Engine's attention, whose kernels need a GPU."""
    job = tiny_job("llama", **PACKING[layout], implementation="transformer_engine", dtype="bf16", micro=1)
    plan, steps = uniform_plan(job, gather="once"), CUT if job.parallel.context > 1 else PACKED
    for differing, seen in te_pool_of(job.gpus).run(changing_lengths, job, plan, steps, {}):
        assert (differing, seen.frames_left, seen.said) == ([], 0, [])
        assert all(counts.recomputed > 0 for counts in seen.counts)
        shards = job.parallel.context * (job.parallel.tensor if job.parallel.sequence_parallel else 1)
        assert seen.met == [
            (len(step.lengths), sum(map(sum, step.lengths)) // shards, sum(each**2 for of in step.lengths for each in of))
            for step in steps
        ]
