"""A head in pieces: every token's loss and every gradient but that of the head's weight equal stock's in every bit, and logits of
one piece are there at a time."""

from __future__ import annotations

from functools import partial

import pytest
from pydantic import ValidationError

from megatron_lynx.config.parallel import Optimizer
from megatron_lynx.plan.plan import Head, Plan
from tests.apply import head_on_ranks
from tests.apply.head_on_ranks import How, compare
from tests.apply.on_ranks import install_and_remove
from tests.long import long
from tests.tiny_jobs import tiny_job
from tests.transparency.plans import plan_for, recomputable

PIECES = 4
UNTIED = {"tied_embeddings": False}
FUSED = {"ddp": True, "model": {"gradient_accumulation_fusion": True}}
SMALL = 1e-6
"""Of fp32 sums in another order, of the largest value."""
ROUNDED = 1 / 128
"""Of sums that are rounded to bf16, with 8 bits, once more."""
ADDED_ROUNDED = 1 / 16
"""Of sums that are rounded to bf16 with every piece."""

CASES = {
    "tied": ({}, How(masked=True), SMALL),
    "untied, all tokens alike": (UNTIED, How(), SMALL),
    "untied, bf16": ({**UNTIED, "dtype": "bf16"}, How(masked=True), ROUNDED),
    "tied, bf16, added to main_grad": ({"dtype": "bf16"}, How(masked=True, **FUSED), SMALL),
    "untied, bf16, added to main_grad": ({**UNTIED, "dtype": "bf16"}, How(masked=True, **FUSED), SMALL),
    "untied, bf16, added to main_grad in bf16": (
        {**UNTIED, "dtype": "bf16", "optimizer": {"gradients": "bf16"}},
        How(masked=True, **FUSED),
        ADDED_ROUNDED,
    ),
    "Megatron's fused loss": ({**UNTIED, "cross_entropy": "native"}, How(masked=True), SMALL),
    "loss per token": (UNTIED, How(masked=True, ddp=True, model={"calculate_per_token_loss": True}), SMALL),
    "TP2": ({"tensor": 2}, How(masked=True), SMALL),
    "TP2, sequence parallel": ({"tensor": 2, "sequence_parallel": True}, How(masked=True), SMALL),
    "TP2, sequence parallel, untied, bf16": (
        {"tensor": 2, "sequence_parallel": True, **UNTIED, "dtype": "bf16"},
        How(masked=True, **FUSED),
        SMALL,
    ),
    "PP2": ({"pipeline": 2}, How(masked=True), SMALL),
    "CP2": ({"context": 2, "attention_dropout": 0.0, **UNTIED}, How(), SMALL),
    "PP2, two chunks": ({"pipeline": 2, "layers_per_chunk": 1, **UNTIED}, How(masked=True), SMALL),
}
NAMES = [name for name in CASES if name != "PP2, two chunks"]


def job_of(fields):
    gradients = Optimizer(**fields.get("optimizer", {}))
    job = tiny_job("gpt", **{name: value for name, value in fields.items() if name != "optimizer"})
    return job.model_copy(update={"optimizer": gradients})


def in_pieces(job, pieces=PIECES):
    """A plan that recomputes what it can, too."""
    plan = plan_for(job, lambda _: recomputable(job, gather=True))
    return Plan.model_validate(plan.model_copy(update={"head": Head(pieces=pieces)}).model_dump())


@pytest.mark.parametrize("name", [*NAMES, *long("PP2, two chunks")])
def test_only_the_gradient_of_the_heads_weight_is_another_sum(pool_of, name):
    fields, how, tolerance = CASES[name]
    job = job_of(fields)
    found = pool_of(job.gpus).run(compare, job, in_pieces(job), how)
    assert sum(each.losses for each in found) == job.microbatches * job.gpus // job.parallel.pipeline
    weights = {"output_layer.weight", *(["embedding.word_embeddings.weight"] if job.model.tied_embeddings else [])}
    for each in found:
        assert {name.removeprefix("1.") for name in each.differing} <= weights, "anything else is equal in every bit"
        assert all(difference < tolerance for difference in each.differing.values())
        stock, ours = each.largest_logits
        assert ours * PIECES == stock
        assert each.left_bytes <= 1024, "counts of hooks, nothing of the step"


def test_evaluation_runs_in_pieces_as_well(pool_of):
    job = tiny_job("gpt")
    (found,) = pool_of(1).run(compare, job, in_pieces(job), How(evaluated=True))
    assert found.differing == {}
    assert found.largest_logits[0] == PIECES * found.largest_logits[1]


def test_without_labels_all_logits_are_there(pool_of):
    job = tiny_job("gpt")
    assert pool_of(1).run(head_on_ranks.logits_without_labels, job, in_pieces(job)) == [True]


def test_logits_that_are_trained_whole_under_a_head_in_pieces_are_named_once(pool_of):
    job = tiny_job("gpt")
    [said] = pool_of(1).run(head_on_ranks.warnings_of_whole_logits, job, in_pieces(job))
    assert said == ["0", "the head runs whole, not in the plan's pieces: its logits are requested (LogitsInPieces)"]


def test_removal_restores_the_identical_objects(pool_of):
    job = tiny_job("gpt", **UNTIED)
    (seen,) = pool_of(1).run(install_and_remove, job, in_pieces(job))
    assert {"model._postprocess", "model.compute_language_model_loss", "output_layer.forward"} <= {*seen["claimed"]}
    assert [seen[when] for when in ("lifted", "removed", "context left", "context failed")] == [[], [], [], []]


LOG_PROBABILITIES = {
    "verl, bf16": (head_on_ranks.as_verl_runs, {**UNTIED, "dtype": "bf16"}, ROUNDED),
    "verl, TP2": (head_on_ranks.as_verl_runs, {"tensor": 2}, SMALL),
    "verl, TP2, sequence parallel, bf16": (
        head_on_ranks.as_verl_runs,
        {**UNTIED, "tensor": 2, "sequence_parallel": True, "dtype": "bf16"},
        ROUNDED,
    ),
    "slime, TP2, bf16": (head_on_ranks.as_slime_runs, {**UNTIED, "tensor": 2, "dtype": "bf16", "micro": 1}, ROUNDED),
}


@pytest.mark.parametrize(("run", "fields", "tolerance"), LOG_PROBABILITIES.values(), ids=LOG_PROBABILITIES)
def test_log_probabilities_and_entropy_are_those_of_whole_logits(pool_of, run, fields, tolerance):
    """Through the functions of docs/launching.md. Only the gradient of the output layer's weight is another sum."""
    job = tiny_job("gpt", **fields)
    weights = {"output_layer.weight", *(["embedding.word_embeddings.weight"] if job.model.tied_embeddings else [])}
    for found in pool_of(job.gpus).run(head_on_ranks.compare_log_probabilities, job, PIECES, run):
        assert found.differing.keys() <= weights, found.differing
        assert all(difference < tolerance for difference in found.differing.values())
        stock, ours = found.largest_logits
        assert ours * PIECES == stock


# --- what is refused -----------------------------------------------------------------------------------------------------


def refused(pool_of, spoil, called=None, later=head_on_ranks.nothing):
    job = tiny_job("gpt", **UNTIED)
    (found,) = pool_of(1).run(partial(head_on_ranks.refused, called=called, later=later), job, in_pieces(job), spoil)
    return found


def test_what_makes_something_else_of_logits_is_refused_by_name(pool_of):
    assert [text for text in refused(pool_of, head_on_ranks.scaled) if "--use-mup" in text]
    (loss,) = refused(pool_of, head_on_ranks.of_another_class)
    assert loss.startswith("model.compute_language_model_loss")


def test_a_second_loss_of_logits_is_refused_and_is_shown_none(pool_of):
    """A hook on the projection was shown what stands for logits in pieces: distillation takes its second loss there."""
    (found,) = refused(pool_of, head_on_ranks.read)
    assert found.startswith("output_layer.forward_hooks: drop what reads logits, such as --logits-load-dir")
    (found,) = refused(pool_of, head_on_ranks.replaced)
    assert found.startswith("model.compute_language_model_loss")
    (found,) = refused(pool_of, head_on_ranks.nothing, {}, head_on_ranks.read)
    assert found.startswith("output_layer.forward_hooks: train without it")


def test_all_that_is_unfit_is_said_at_once(pool_of):
    found = refused(pool_of, head_on_ranks.unfit)
    assert [text.partition(":")[0] for text in found] == [
        "config.config_logger_dir",
        "config.defer_embedding_wgrad_compute",
        "config.enable_autocast",
        "output_layer.bias",
        "output_layer.gather_output",
        "output_layer.output_dtype",
        "output_layer.weight.requires_grad",
    ]


def test_a_call_that_wants_the_whole_vocabulary_is_refused(pool_of):
    (found,) = refused(pool_of, head_on_ranks.nothing, {"runtime_gather_output": True})
    assert found.startswith("model: runtime_gather_output")


@pytest.mark.parametrize(("pieces", "said"), [(3, "must divide the tokens of a sequence on one rank (16)"), (1, "greater than")])
def test_pieces_that_cannot_be(pieces, said):
    with pytest.raises(ValidationError, match=said.replace("(", r"\(").replace(")", r"\)")):
        in_pieces(tiny_job("gpt"), pieces)


def test_without_flushes_a_head_is_whole():
    plan = in_pieces(tiny_job("gpt", pipeline=2))
    with pytest.raises(ValidationError, match=r"head.pieces is 4, but schedule is double_buffered"):
        Plan.model_validate(plan.model_dump() | {"schedule": "double_buffered"})
