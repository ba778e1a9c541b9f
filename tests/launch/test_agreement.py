"""One rank's mistake ends all ranks, and only rank 0 says why."""

from __future__ import annotations

import pytest

from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from . import on_ranks
from .launched import saved


def test_ranks_that_agree_go_on(pool_of):
    assert pool_of(2).run(on_ranks.agreeing, [], ["a", "a"]) == [(None, "")] * 2


@pytest.mark.parametrize(
    ("wrong", "contents", "says"),
    [
        ([1], ["a", "a"], "megatron-lynx: no plan\n  - rank 1: plan.yaml: found no such file, needed a plan\n"),
        ([0], ["a", "a"], "megatron-lynx: no plan\n  - rank 0: plan.yaml: found no such file, needed a plan\n"),
        ([0, 1], ["a", "a"], "megatron-lynx: no plan\n  - plan.yaml: found no such file, needed a plan\n"),
        (
            [],
            ["a", "b"],
            "megatron-lynx: the ranks disagree\n  - --lynx-plan plan.yaml: found other contents on rank 1 than on rank 0, "
            "needed the same file on all ranks\n",
        ),
    ],
    ids=["rank 1", "rank 0", "both", "contents"],
)
def test_all_end_together(pool_of, wrong, contents, says):
    assert pool_of(2).run(on_ranks.agreeing, wrong, contents) == [(2, says), (2, "")]


def test_a_users_mistake_on_any_rank_is_the_exit_status_of_all(pool_of):
    assert pool_of(2).run(on_ranks.agreeing_in_different_errors) == [2, 2]


def test_ranks_with_other_plans_end_before_they_train(pool_of, tmp_path):
    """A path may mean another file on another node. Ranks with other windows would wait for each other for ever."""
    job = tiny_job("gpt")
    other = uniform_plan(job).model_copy(update={"batch": uniform_plan(job).batch.model_copy(update={"microbatches": 3})})
    plans = [str(saved(plan, tmp_path / f"{name}.yaml")) for name, plan in (("one", uniform_plan(job)), ("other", other))]
    args = {
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_layers": job.model.layers,
        "hidden_size": job.model.hidden,
        "ffn_hidden_size": job.model.ffn,
        "num_attention_heads": job.model.heads,
        "seq_length": job.model.seq,
        "micro_batch_size": job.batch.micro,
    }
    assert pool_of(2).run(on_ranks.preparing, plans[:1] * 2, args) == [(None, "")] * 2
    (status, said), other_rank = pool_of(2).run(on_ranks.preparing, plans, args)
    assert (status, other_rank) == (2, (2, ""))
    assert f"--lynx-plan {plans[0]}: found other contents on rank 1 than on rank 0" in said
