"""Launches, read as Megatron reads them; `scripts/check_examples.py` asks Megatron's own parser."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lynx.advise.flags import command as changed_command
from megatron_lynx.config import Experts
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.cost.parameters import stage_parameters
from megatron_lynx.errors import ConfigError
from megatron_lynx.kinds.mamba.section import MAMBA, MambaSizes
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.launch_arguments import Reading, job_of, read_launch
from megatron_lynx.launch_arguments.parallel_facts import layers_of_layout
from megatron_lynx.launch_arguments.reading import unsaid
from megatron_lynx.plan.layout import layout_text
from megatron_lynx.planner.summary import job_flags
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.stock.legality import Facts, offered
from megatron_lynx.stock.setting import StockSetting
from tests.search.jobs import jobs_of
from tests.uniform import uniform_plan

SMALL = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --max-position-embeddings 512 "
    "--micro-batch-size 2 --vocab-size 50257 --bf16 --lr 1e-4"
)


MTP = "--pipeline-model-parallel-size 2 --mtp-num-layers 1 --pipeline-model-parallel-layout"


def read(text: str, **options: Any) -> Reading:
    return read_launch(shlex.split(text), **{"gpus": 8, **options})


def facts(text: str, **options: Any) -> dict[str, Any]:
    return {fact.place: fact.value for fact in read(text, **options).facts}


def problems(text: str, **options: Any) -> str:
    return "\n".join(str(problem) for problem in read(text, **options).problems)


def test_defaults_are_megatrons() -> None:
    found = facts(SMALL)
    assert found["model.ffn"] == 4096
    assert found["model.kv_groups"] == 16
    assert found["model.vocab"] == 50304
    assert (found["model.attention_dropout"], found["model.hidden_dropout"]) == (0.1, 0.1)
    assert (found["model.attention"], found["model.position"], found["model.norm"]) == ("flash", "learned", "layernorm")
    assert (found["model.bias"], found["model.tied_embeddings"], found["model.dtype"]) == (True, True, "bf16")
    assert found["batch.global"] == 16, "one micro-batch on each replica"
    assert problems(SMALL) == ""


def test_llama_like() -> None:
    found = facts(
        f"{SMALL} --swiglu --normalization RMSNorm --group-query-attention --num-query-groups 4 --disable-bias-linear "
        "--untie-embeddings-and-output-weights --use-rotary-position-embeddings --attention-dropout 0 --hidden-dropout 0.0 "
        "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 64 --use-distributed-optimizer"
    )
    assert found["model.ffn"] == 2688, "64 floor(8 h / 3 / 64)"
    assert (found["model.kv_groups"], found["model.vocab"]) == (4, 50432), "padded to 128 x 2"
    assert (found["model.activation"], found["model.norm"], found["model.position"]) == ("swiglu", "rmsnorm", "rope")
    assert (found["model.bias"], found["model.tied_embeddings"]) == (False, False)
    assert (found["parallel.sequence_parallel"], found["parallel.distributed_optimizer"]) == (True, True)


def test_sequence_parallelism_over_one_rank_is_none() -> None:
    assert facts(f"{SMALL} --sequence-parallel")["parallel.sequence_parallel"] is False


def test_groups_of_micro_batches_are_read_where_stages_have_chunks() -> None:
    grouped = (
        f"{SMALL} --pipeline-model-parallel-size 2 --global-batch-size 64 --microbatch-group-size-per-virtual-pipeline-stage 4"
    )
    assert "parallel.microbatch_group" not in facts(grouped)
    assert facts(f"{grouped} --num-layers-per-virtual-pipeline-stage 2")["parallel.microbatch_group"] == 4
    assert facts(f"{grouped} --pipeline-model-parallel-layout 'Et*2|t*2|t*2|t*2L'")["parallel.microbatch_group"] == 4


def test_groups_without_their_switch_have_no_effect() -> None:
    assert facts(f"{SMALL} --num-query-groups 4")["model.kv_groups"] == 16


@pytest.mark.parametrize(
    ("flags", "vocabulary"),
    [
        ("--padded-vocab-size 51200", 51200),
        ("--tokenizer-type NullTokenizer --vocab-size 256", 256),  # 0.18 on
        ("--tokenizer-type NullTokenizer --vocab-size 256 --hybrid-attention-ratio 0.0 --enable-chunked-prefill", 384),
        ("--no-pad-vocab-size", 50257),
        ("--make-vocab-size-divisible-by 1000 --tensor-model-parallel-size 2", 52000),
    ],
)
def test_vocabulary(flags: str, vocabulary: int) -> None:
    assert facts(f"{SMALL} {flags}")["model.vocab"] == vocabulary


def test_vocabulary_that_only_a_tokenizer_knows_is_asked_for(tmp_path: Path) -> None:
    text = SMALL.replace("--vocab-size 50257", "")
    assert "--vocab-size: found nothing" in problems(f"{text} --tokenizer-type HuggingFaceTokenizer --tokenizer-model x")
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    assert facts(f"{text} --vocab-file {tmp_path / 'vocab.json'}")["model.vocab"] == 128


@pytest.mark.parametrize(
    ("flags", "partition"),
    [
        ("--num-virtual-stages-per-pipeline-rank 2", [1] * 8),
        ("--decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 3", [1, 2, 2, 3]),
        ("--decoder-last-pipeline-num-layers 2", [2, 2, 2, 2]),
        ("--num-layers 10 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [2, 3, 3, 2]),
        ("--pipeline-model-parallel-layout 'Et|(tt|)*2t*3L'", [1, 2, 2, 3]),
        ("--pipeline-model-parallel-layout Ett|t|t|t,|(t|)*2|tL", [2, 1, 1, 1, 1, 1, 0, 1]),
    ],
)
def test_layers_of_virtual_stages(flags: str, partition: list[int]) -> None:
    assert facts(f"{SMALL} --pipeline-model-parallel-size 4 {flags}")["parallel.partition"] == partition


def test_what_a_launch_leaves_open_a_plan_may_decide() -> None:
    text = f"{SMALL} --pipeline-model-parallel-size 4"
    assert facts(text)["parallel.partition"] == "auto"
    assert "parallel.partition" not in facts(text, planning=False)
    assert facts(f"{text} --num-layers-per-virtual-pipeline-stage 1")["parallel.layers_per_chunk"] == 1


@pytest.mark.parametrize(
    "flags",
    [
        "--decoder-first-pipeline-num-layers 1",
        "--num-virtual-stages-per-pipeline-rank 3",
        "--pipeline-model-parallel-layout Etx|t|t|tL",
        "--pipeline-model-parallel-layout Et|t --num-layers-per-virtual-pipeline-stage 1",
    ],
)
def test_layers_that_do_not_come_out_even_are_named(flags: str) -> None:
    assert flags.split()[0] in problems(f"{SMALL} --pipeline-model-parallel-size 4 {flags}")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--num-experts 8 --moe-pad-expert-input-to-capacity", "needed --moe-expert-capacity-factor beside it"),
        ("--num-experts 8 --moe-layer-freq ([0]+[1]*6)", "found a pattern of 7 layers, needed one of --num-layers (8)"),
        (
            "--num-experts 8 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep",
            "found ncclep, needed deepep or hybridep",
        ),
        ("--expert-model-parallel-size 8", "found 8, needed --num-experts beside it"),
        ("--num-experts 8 --moe-mlp-glu-interleave-size 32", "saves for backward is not counted"),
        ("--num-experts 8 --moe-single-grouped-weight", "share one parameter"),
        ("--num-experts 8 --moe-ncclep-static-shape", "dropped or padded"),
        ("--num-experts 8 --moe-layer-freq ([1]*1000*1000*1000*1000)", "a pattern of more than 1000 layers"),
        (f"--num-experts 8 --moe-layer-freq []*{10**30}", "found a pattern of 0 layers"),
        (f"--num-experts 8 --moe-layer-freq {'9' * 5000}", "needed a number, or lists"),
        (f"--num-experts 8 --moe-layer-freq [1]*{10**18}", "a pattern of more than 1000 layers"),
        ("--num-experts 8 --moe-layer-freq " + "+".join(["[0]*1000"] * 3), "a pattern of more than 1000 layers"),
        (f"--num-experts 8 --moe-layer-freq {'(' * 3000}[1]{')' * 3000}", "is no list of 0 and 1"),
        (f"--num-experts 8 --moe-layer-freq {'[1]+' * 5000}[1]", "characters (at most 10000)"),
        ("--num-experts 8 --moe-layer-freq [0]+2", "needed a number, or lists of 0 and 1"),
        (
            "--multi-latent-attention --position-embedding-type rope --rope-type rope",
            "--rope-type: found rope, needed --rope-type",
        ),
        (f"{MTP} Ettt|tttttL", "0 times m in 'Ettt|tttttL': needed 1, as --mtp-num-layers says"),
        (f"{MTP} Etttm|tttttL", "before its last stage: needed all beside L"),
        ("--multi-latent-attention --tp-comm-overlap", "userbuffers are not shown with latent attention"),
        ("--multi-latent-attention --cache-mla-latents", "it is for inference"),
        ("--multi-latent-attention --mla-down-proj-fusion", "two items"),
        (
            "--fp8-format hybrid --fp8-recipe mxfp8 --fp8-param-gather --use-distributed-optimizer",
            "--fp8-param-gather: found given, needed --reuse-grad-buf-for-mxfp8-param-ag beside it",
        ),
        ("--context-parallel-size 2 --cp-comm-type ring", "--cp-comm-type: found ring, needed one of p2p, all_gather, a2a"),
        ("--context-parallel-size 2 --cp-comm-type p2p a2a", "--cp-comm-type: found p2p a2a, needed the same in every layer"),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes [2 2]",
            "found [2, needed a whole",
        ),
        ("--context-parallel-size 2 --hybrid-context-parallel", "changes with the data"),
        ("--squared-relu --swiglu", "--squared-relu: found also --swiglu, needed one of them"),
        ("--quick-geglu --swiglu", "--quick-geglu: found also --swiglu, needed one of them"),
        ("--window-size 127,1", "--window-size: found 127,1, needed two numbers such as 127,0"),
        ("--window-size 127,0 --window-attn-skip-freq [1,0]", "a pattern of 2 layers, needed one of --num-layers (8)"),
        ("--optimizer soap", "--optimizer: found soap, needed one of adam, sgd, lion, ademamix, muon"),
        ("--checkpoint-activations", "no longer takes it"),
        ("--position-embedding-type relative", "--position-embedding-type: found relative"),
        ("--use-dist-ckpt --enable-msc --disable-msc --hybrid-attention-ratio 0.1 --mtp-detach-heads", "no one release"),
        ("--global-batch-size 32 --step-batch-size-schedule '0:8 1M:16'", "also --global-batch-size 32, needed one of them"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(flags: str, named: str) -> None:
    assert named in problems(f"{SMALL} {flags}")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--context-parallel-size 4", {"context": 4, "context_exchange": "p2p"}),
        ("--context-parallel-size 4 --cp-comm-type a2a", {"context": 4, "context_exchange": "a2a"}),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            {"context": 4, "context_exchange": "a2a+p2p", "context_levels": [2, 2]},
        ),
        ("--cp-comm-type a2a", {"context": 1}),
    ],
)
def test_context_parallelism(flags: str, said: dict[str, object]) -> None:
    found = facts(f"{SMALL} {flags}")
    places = {name.removeprefix("parallel."): value for name, value in found.items() if name.startswith("parallel.context")}
    assert places == said
    assert problems(f"{SMALL} {flags}") == ""


@pytest.mark.parametrize(
    "flags", ["--context-parallel-size 1", "--optimizer adam", "--fp8-margin 0", "--num-experts 0 --moe-layer-recompute"]
)
def test_a_refused_flag_that_changes_nothing_is_not_refused(flags: str) -> None:
    assert problems(f"{SMALL} {flags}") == ""


@pytest.mark.parametrize(
    ("flags", "layers"),
    [("", None), ("--moe-layer-freq 2", 2), ("--moe-layer-freq ([0]*2+[1]*2)*2", ["3-4", "7-8"]), ("--moe-layer-freq 1", None)],
)
def test_layers_of_experts(flags: str, layers: object) -> None:
    found = facts(f"{SMALL} --num-experts 8 --moe-ffn-hidden-size 256 --moe-aux-loss-coeff 1e-2 {flags}")
    experts = {place.removeprefix("model.experts."): value for place, value in found.items() if place.startswith("model.experts")}
    assert experts == {"count": 8, "per_token": 2, "ffn": 256} | ({"layers": layers} if layers else {})
    assert "model.experts.count" not in facts(f"{SMALL} --moe-layer-freq 2")


@pytest.mark.parametrize(
    ("flags", "load", "holds"),
    [
        ("--moe-expert-capacity-factor 1.5", None, 1.5),
        ("--moe-expert-capacity-factor 0.5", 0.5, 0.5),
        ("--moe-expert-capacity-factor 9", None, 2.0),
        ("--moe-expert-capacity-factor -1", None, None),
        ("--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity", 1.5, None),
        ("--moe-expert-capacity-factor 0.5 --moe-pad-expert-input-to-capacity", 0.5, None),
    ],
)
def test_a_capacity_bounds_what_experts_get(flags: str, load: float | None, holds: float | None) -> None:
    """Dropped tokens bound the bytes, padded ones and those of a factor below 1 the seconds, too; two ranks cannot get more than
    all tokens. Factors below 1 were priced as 1."""
    found = facts(f"{SMALL} --num-experts 8 --moe-ffn-hidden-size 256 --expert-model-parallel-size 2 {flags}")
    assert (found.get("model.experts.load"), found.get("model.experts.holds")) == (load, holds)


def test_latent_attention() -> None:
    """Its rotary kernel is fused unless a flag, or another kind of positions, switches that off. It has keys for every head, so
    groups of them mean nothing."""
    flags = "--multi-latent-attention --kv-lora-rank 64 --position-embedding-type rope"
    for more, fused in (("", True), ("--no-rope-fusion", False), ("--no-rope-fusion --rope-type rope", False)):
        found = facts(f"{SMALL} {flags} {more} --group-query-attention --num-query-groups 2")
        assert found["model.latent.kv_rank"] == 64
        assert found.get("model.latent.fused_rotary", False) is fused
        assert found["model.kv_groups"] == found["model.heads"]


@pytest.mark.parametrize(
    ("flags", "dispatcher"),
    [
        ("--moe-token-dispatcher-type alltoall", None),
        ("--moe-token-dispatcher-type alltoall --moe-flex-dispatcher-backend hybridep", None),
        ("--moe-token-dispatcher-type flex", "deepep"),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep", "deepep"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep", "hybridep"),
    ],
)
def test_who_brings_tokens_to_experts(flags: str, dispatcher: str | None) -> None:
    found = facts(f"{SMALL} --num-experts 8 --expert-model-parallel-size 2 {flags}")
    assert found.get("model.experts.dispatcher") == dispatcher


@pytest.mark.parametrize(
    ("flags", "taken"),
    [
        ("", None),
        ("--moe-deepep-num-sms 24", 24),
        ("--moe-flex-dispatcher-num-sms 12", 12),
        ("--moe-hybridep-num-sms 12", None),
        ("--moe-flex-dispatcher-backend hybridep --moe-hybridep-num-sms 12", 12),
    ],
)
def test_how_many_multiprocessors_bring_tokens_to_experts(flags: str, taken: int | None) -> None:
    found = facts(f"{SMALL} --num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex {flags}")
    assert found.get("model.experts.multiprocessors") == taken


def test_rows_of_a_rank_are_bounded_by_nccl_ep_alone() -> None:
    """With HybridEP the flag comes with fused experts, which nobody looks into."""
    flex = f"{SMALL} --num-experts 8 --moe-token-dispatcher-type flex --moe-expert-rank-capacity-factor 1.5"
    backend = f"{flex} --moe-flex-dispatcher-backend"
    assert facts(f"{backend} ncclep")["model.experts.holds"] == 1.5
    assert "found 1.5, needed none: with HybridEP Megatron takes it beside --use-transf" in problems(f"{backend} hybridep")
    assert "model.experts.holds" not in facts(f"{backend} hybridep")


def test_what_experts_may_have_beside_them() -> None:
    """A launch with experts was told that they are "a feature that is not switched on"."""
    reading = read(f"{SMALL} --num-experts 8 --moe-per-layer-logging --moe-permute-fusion")
    assert reading.problems == ()
    assert reading.no_matter["logging"] == ("--moe-per-layer-logging",)
    assert "--moe-permute-fusion" in dict(reading.priced_as)
    assert "a feature that is not switched on" not in reading.no_matter
    without = read(f"{SMALL} --moe-mlp-glu-interleave-size 32")
    assert (without.problems, without.priced_as) == ((), ())
    assert "--moe-mlp-glu-interleave-size" in without.no_matter["a feature that is not switched on"]


@pytest.mark.parametrize(
    ("flags", "whole"),
    [
        ("--moe-grouped-gemm", False),
        ("--moe-shared-expert-overlap", True),
        ("--moe-use-legacy-grouped-gemm", True),
        ("--moe-grouped-gemm --transformer-impl local", True),
    ],
)
def test_experts_that_cannot_be_looked_into_are_kept_whole(flags: str, whole: bool) -> None:
    reading = read(f"{SMALL} --num-experts 8 {flags}")
    assert [fact.value for fact in reading.facts if fact.place == "model.experts.whole"] == [True] * whole


@pytest.mark.parametrize("flags", ["", "--moe-token-dispatcher-type allgather"])
def test_gathers_of_all_tokens_are_megatrons_default(flags: str) -> None:
    """They were refused. Where experts are on one rank nothing is gathered."""
    shared = f"{SMALL} --num-experts 8 --moe-router-topk 2 {flags}"
    assert "dispatcher" not in read(shared).job_data["model"]["experts"]
    reading = read(f"{shared} --expert-model-parallel-size 2", gpus=8)
    assert reading.problems == ()
    job = job_of(reading, "h100-80g")
    assert job.model.moe_dispatcher == "allgather"
    assert "--moe-token-dispatcher-type allgather" in [*job_flags(job)]


def test_instances_of_the_distributed_optimizer_are_read() -> None:
    """They were refused."""
    flags = "--num-distributed-optimizer-instances 2"
    reading = read(f"{SMALL} {flags} --use-distributed-optimizer", gpus=8)
    assert (reading.problems, reading.job_data["parallel"]["optimizer_instances"]) == ((), 2)
    job = job_of(reading, "h100-80g")
    assert f"--use-distributed-optimizer {flags}" in " ".join(job_flags(job))
    assert [job.optimizer_sharers, job.replicas] == [4, 8]
    (problem,) = read(f"{SMALL} {flags}", gpus=8).problems
    assert str(problem).startswith("--num-distributed-optimizer-instances: found 2, needed --use-distributed-optimizer beside it")
    layouts = list(jobs_of(job, 16))
    assert layouts
    assert all(each.parallel.optimizer_instances == 2 for each in layouts)
    assert all(16 // (each.parallel.tensor * each.parallel.pipeline) % 2 == 0 for each in layouts)


def test_shared_experts_beside_the_exchanges_are_read() -> None:
    """Where Megatron takes it: not beside an all-gather, nor overlapped exchanges, which are refused with the setting."""
    shared = f"{SMALL} --num-experts 8 --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap"
    for flags, found, refused in (
        ("--moe-token-dispatcher-type alltoall", [True], ()),
        ("--moe-token-dispatcher-type flex", [True], ()),
        ("--moe-token-dispatcher-type allgather", [True], ("--moe-shared-expert-overlap",)),
        ("--moe-token-dispatcher-type alltoall --overlap-moe-expert-parallel-comm", [], ()),
    ):
        reading = read(f"{shared} {flags}")
        assert [fact.value for fact in reading.facts if fact.place == "model.experts.shared_beside"] == found
        assert tuple(problem.where for problem in reading.problems) == refused
        assert not [said for said, _ in reading.priced_as if "shared" in said]
    with pytest.raises(ValueError, match="shared_beside true needs shared_ffn, whole: true and overlapped: false, found 0"):
        Experts(count=8, per_token=2, ffn=64, shared_beside=True)


def test_a_flag_of_experts_that_nobody_has_judged_is_not_ignored() -> None:
    """As the next release may have one: of what it does to experts nothing is known."""
    table = Path(__file__).parents[2] / "megatron_lynx/launch_arguments/flags.json"
    assert {"moe", "transformer configuration"}.isdisjoint(json.loads(table.read_text(encoding="utf-8"))["groups"])


def test_mamba_layers_without_their_own_kernel_are_refused() -> None:
    """The flag switches something off that is on by default; what it sets was taken for a feature that is not switched on."""
    found = problems(f"{SMALL} --disable-mamba-mem-eff-path")
    assert "--disable-mamba-mem-eff-path: found given, needed a launch without it: what Mamba layers save" in found


def test_everything_wrong_is_said_at_once() -> None:
    text = problems("--num-layers x --hidden-size --seq-length $SEQ stray --num-layer 3 --mla-down-proj-fusion", gpus=None)
    for part in (
        "--num-layers: found x, needed a whole number",
        "--hidden-size: found nothing",
        "--seq-length: found $SEQ, needed a whole number; let the shell fill its variables in",
        "'stray'",
        "--num-layer: found unknown, needed a flag of Megatron 0.16 to 0.20; did you mean --num-layers?",
        "--mla-down-proj-fusion",
        "--micro-batch-size",
        "no number of processes",
    ):
        assert part in text


def test_a_mistyped_flag_is_named_beside_what_follows_from_it() -> None:
    """`layers_per_chunk needs pipeline > 1` alone sends one to the wrong flag."""
    text = f"{SMALL} --pipeline-model-parallel-siz 4 --num-layers-per-virtual-pipeline-stage 2 --my-own-flag 3"
    with pytest.raises(ConfigError) as caught:
        job_of(read(text, gpus=8), "h100-80g")
    found = [str(problem) for problem in caught.value.problems]
    assert any("needs pipeline > 1" in problem for problem in found)
    assert any("--pipeline-model-parallel-siz: found unknown" in problem for problem in found)
    assert not any("--my-own-flag" in problem for problem in found)


def test_no_flag_is_silently_ignored() -> None:
    """Every flag of a launch turns up: in a fact, as priced, as without matter, or as a problem."""
    text = f"{SMALL} --fp16-lm-cross-entropy --use-flash-attn --squared-relu --seed 5 --swiglu --no-bias-swiglu-fusion "
    text += "--num-query-groups 4 --kv-channels 64 --recompute-modules mlp"
    reading = read(text)
    said = " ".join(fact.origin for fact in reading.facts) + str(reading.priced_as) + str(reading.no_matter)
    said += str(reading.problems)
    for flag in (word for word in text.split() if word.startswith("--")):
        assert flag in said, flag


def test_a_longer_table_of_positions_is_said() -> None:
    longer = SMALL.replace("--max-position-embeddings 512", "--max-position-embeddings 1024")
    assert read(longer).priced_as == (("--max-position-embeddings", "a table of positions with 512 rows"),)
    assert read(f"{longer} --position-embedding-type rope").priced_as == ()


def test_recomputation_is_an_estimates_policy() -> None:
    assert facts(SMALL, planning=False)["policy"] == "none"
    assert facts(f"{SMALL} --recompute-activations", planning=False)["policy"] == "selective"
    full = f"{SMALL} --recompute-granularity full --recompute-method uniform --recompute-num-layers"
    assert facts(f"{full} 1", planning=False)["policy"] == "full"
    assert facts(f"{full} 2", planning=False)["policy"] == "none", "there is no such policy: it is priced as stock's setting"


@pytest.mark.parametrize(
    ("flags", "gradients"),
    [
        ("", "fp32"),
        ("--accumulate-allreduce-grads-in-fp32", "fp32"),
        ("--grad-reduce-in-bf16", "bf16"),
        ("--use-precision-aware-optimizer --use-distributed-optimizer --main-grads-dtype bf16", "bf16"),
    ],
)
def test_bf16_adds_gradients_up_in_fp32_unless_told_otherwise(flags: str, gradients: str) -> None:
    assert facts(f"{SMALL} {flags}")["optimizer.gradients"] == gradients
    assert problems(f"{SMALL} {flags}") == ""


def test_fp16_adds_gradients_up_in_fp16_unless_told_otherwise() -> None:
    half = SMALL.replace("--bf16", "--fp16 --grad-reduce-in-bf16")
    assert facts(half)["optimizer.gradients"] == "bf16"
    assert facts(f"{half} --accumulate-allreduce-grads-in-fp32")["optimizer.gradients"] == "fp32"
    assert facts(SMALL.replace("--bf16", "--grad-reduce-in-bf16"))["optimizer.gradients"] == "fp32"


def test_a_precision_aware_optimizer() -> None:
    aware = "--use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8"
    found = facts(f"{SMALL} {aware}")
    assert {place.removeprefix("optimizer."): value for place, value in found.items() if place.startswith("optimizer.")} == {
        "gradients": "fp32",
        "precision_aware": True,
        "main_parameters": "remainder",
        "first_moment": "bf16",
        "second_moment": "fp8",
    }
    assert facts(f"{SMALL} {aware} --main-params-dtype fp16")["optimizer.main_parameters"] == "fp16"
    assert facts(f"{SMALL.replace('--bf16', '--fp16')} {aware}")["optimizer.main_parameters"] == "fp32"
    assert problems(f"{SMALL} --exp-avg-dtype bf16") == (
        "--exp-avg-dtype: found bf16, needed --use-precision-aware-optimizer beside it; Megatron stops here"
    )
    assert "needed --use-distributed-optimizer beside it" in problems(f"{SMALL} --use-precision-aware-optimizer")


def test_an_optimizer_on_the_host_is_read() -> None:
    """Megatron's default share is all of it; the flag alone says so, as in launches of reinforcement learning."""
    aware = "--use-distributed-optimizer --use-precision-aware-optimizer"
    on_host = facts(f"{SMALL} {aware} --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d")
    assert (on_host["optimizer.offload"], on_host["optimizer.overlap_copies"]) == (1.0, True)
    half = facts(f"{SMALL} {aware} --optimizer-cpu-offload --optimizer-offload-fraction 0.5")
    assert (half["optimizer.offload"], half["optimizer.overlap_copies"]) == (0.5, False)
    assert "optimizer.offload" not in facts(f"{SMALL} {aware} --optimizer-offload-fraction 0.5"), (
        "without the flag it says nothing"
    )
    assert problems(f"{SMALL} --optimizer-cpu-offload") == (
        "--optimizer-cpu-offload: found given, needed --use-precision-aware-optimizer beside it; Megatron stops here"
    )


def test_a_batch_that_grows_is_planned_for_at_its_end() -> None:
    assert facts(f"{SMALL} --global-batch-size 64 --rampup-batch-size 16 16 1000")["batch.global"] == 64
    assert facts(f"{SMALL} --step-batch-size-schedule '0:16 2.4B:320'")["batch.global"] == 320


def test_layers_that_predict_more_tokens_are_in_layouts() -> None:
    """DeepSeek-V3's, whose last stage has no other layer; a plan writes what it read."""
    said = facts(f"{SMALL.replace('layers 8', 'layers 61')} --mtp-num-layers 1 {DEEPSEEK}", gpus=8)
    counts = said["parallel.partition"]
    assert (said["model.mtp"], len(counts), counts[0], counts[-2:], sum(counts)) == (1, 32, 2, [2, 0], 61)
    assert layers_of_layout(layout_text(counts, 1), 1) == tuple(counts)


DEEPSEEK = "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout Et*2|(tt|)*22t|(tt|)*7mL"


def test_what_gpt_oss_has_of_its_own() -> None:
    flags = "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --softmax-type learnable --enable-gpt-oss"
    found = facts(f"{SMALL} {flags} --window-size 127,0 --window-attn-skip-freq 3")
    assert (found["model.activation"], found["model.activation_clamped"], found["model.sinks"]) == ("quick_geglu", True, True)
    assert (found["model.window.keys"], found["model.window.share"]) == (128, 0.75)
    assert facts(f"{SMALL} --window-size (127,0) --window-attn-skip-freq ([1]*3+[0])*2")["model.window.share"] == 0.75


def test_what_slime_sets_itself_is_read() -> None:
    """Of a launch that packs tokens: two context-parallel ranks have one sequence of both. What is said counts."""
    flags = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50257 --max-tokens-per-gpu 4096 --lr 1e-4"
    flags += " --context-parallel-size 2 --use-precision-aware-optimizer --use-tp-pp-dp-mapping --global-batch-size 64"
    reading = read(flags)
    assert reading.problems == ()
    data = reading.job_data
    assert (data["model"]["seq"], data["model"]["dtype"], data["batch"]) == (8192, "bf16", {"micro": 1, "global": 64})
    assert data["parallel"]["distributed_optimizer"] is True
    assert read(f"{flags} --micro-batch-size 2").job_data["batch"]["micro"] == 2
    assert read(f"{flags} --seq-length 512 --micro-batch-size 1").job_data["model"]["seq"] == 512
    assert "--use-tp-pp-dp-mapping" in dict(reading.priced_as)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("", []),
        ("--bf16", ["--bf16 is not given: weights, activations and GEMMs are in fp32"]),
        ("--moe-token-dispatcher-type alltoall", ["--moe-token-dispatcher-type is not given: Megatron's default, allgather"]),
        (
            "--no-create-attention-mask-in-dataloader",
            ["--no-create-attention-mask-in-dataloader is not given: a mask of 1.00 GiB"],
        ),
    ],
)
def test_a_costly_default_is_named_with_its_flag(changed: str, said: list[str]) -> None:
    """A launch in fp32 for want of `--bf16` was 215 GiB without a word, and which dispatcher was priced was not shown: Mixtral
    takes 3.3 s with the one, 9.3 s with Megatron's default."""
    words = f"{SMALL} --num-experts 8 --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall"
    words = f"{words} --no-create-attention-mask-in-dataloader --seq-length 32768 --micro-batch-size 1".replace(changed, "")
    reading = read(f"pretrain_gpt.py {words}")
    assert reading.problems == ()
    assert [line[: len(start)] for line, start in zip(unsaid(reading), said, strict=True)] == said


def test_what_changes_the_bytes_of_experts_is_read() -> None:
    """These flags were listed as of no matter."""
    words = f"{SMALL} --num-experts 256 --moe-router-topk 8 --squared-relu --use-fused-weighted-squared-relu --moe-grouped-gemm"
    words += " --moe-router-score-function sigmoid --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-z-loss-coeff 1e-3"
    experts = read(f"{words} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4").job_data["model"][
        "experts"
    ]
    assert experts["weighted_relu"] is True
    assert experts["scores"] == pytest.approx(3 + (256 + 8 * (8 * 2 + 4)) / 1024, abs=1e-3)
    assert "weighted_relu" not in read(f"{words} --transformer-impl local").job_data["model"]["experts"]
    local = f"{SMALL} --transformer-impl local --attention-softmax-in-fp32"
    assert "--attention-softmax-in-fp32" in dict(read(f"{local} --no-masked-softmax-fusion").priced_as)
    assert "--attention-softmax-in-fp32" not in dict(read(local).priced_as)
    pinned = [read(f"{SMALL} --flash-attention-version {version}").job_data["model"] for version in (2, 3)]
    assert [model.get("attention_kernel", "usual") for model in pinned] == ["flash_attention_2", "usual"]


def test_activations_of_forks_are_priced_as_what_they_keep() -> None:
    """Apertus is trained with xIELU; it was priced as Megatron's default, a GELU, with a warning about an unknown flag alone."""
    reading = read(f"{SMALL} --xielu --strange")
    assert reading.problems == ()
    assert reading.job_data["model"]["activation"] == "squared_relu"
    assert reading.given.unknown == ("--strange",)
    assert ("--xielu", "a squared ReLU: it keeps and moves as much, its own parameters apart") in reading.priced_as


def test_slimes_batch_follows_from_its_rollouts() -> None:
    """Its scripts for DeepSeek-V3, Kimi K2, GLM and Moonlight state no batch: it was taken for a micro-batch on each replica."""
    flags = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50257 --max-tokens-per-gpu 4096"
    flags += " --rollout-batch-size 128 --n-samples-per-prompt 8 --num-steps-per-rollout 4"
    assert read(flags).job_data["batch"]["global"] == 256
    assert read(f"{flags} --global-batch-size 64").job_data["batch"]["global"] == 64
    assert read(flags).given.unknown == ()


def test_flags_of_slimes_that_were_read_are_not_called_uncounted() -> None:
    """`--max-tokens-per-gpu` decided the micro-batch, and the screen said that it was not counted."""
    flags = "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50257 --max-tokens-per-gpu 4096"
    reading = read(f"{flags} --use-dynamic-batch-size --rollout-batch-size 16 --global-batch-size 64 --num-experts 8")
    assert reading.given.unknown == ("--rollout-batch-size 16",)
    assert reading.job_data["model"]["experts"].get("dispatcher", "alltoall") == "alltoall"
    assert read(f"{flags} --seq-length 512 --micro-batch-size 1").given.unknown == ("--max-tokens-per-gpu 4096",)


def test_a_batch_that_no_flag_states_is_a_micro_batch_of_each_replica() -> None:
    """Ranks that share a sequence were counted as replicas: a step then had twice the micro-batches."""
    layout = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    for context, replicas in ((1, 4), (2, 2), (4, 1)):
        reading = read(f"{SMALL} {layout} --context-parallel-size {context}", gpus=16)
        assert reading.job_data["batch"] == {"micro": 2, "global": 2 * replicas}


def test_a_schedule_of_batches_that_lost_its_quotes() -> None:
    """As in Megatron's example for GPT-3 175B: the launch under a plan has them, and no size beside it that Megatron refuses."""
    words = shlex.split(f"{SMALL} --step-batch-size-schedule 0:8 2.4B:16 12B:32 --global-batch-size 32 --seed 1")
    reading = read_launch(words, gpus=8)
    assert reading.problems == ()
    assert reading.job_data["batch"]["global"] == 32
    arguments = reading.changed({}).arguments
    assert arguments[-4:] == ("--step-batch-size-schedule", "0:8 2.4B:16 12B:32", "--seed", "1")


@pytest.mark.parametrize(("said", "states"), [("sgd", 1), ("sgd --sgd-momentum 0", 0), ("ademamix", 3), ("adam", 2)])
def test_optimizers_are_read_by_the_numbers_that_they_remember(said: str, states: int) -> None:
    """AdEMAMix is a fork's; four bytes each beside the main parameter."""
    reading = read(f"{SMALL} --optimizer {said}")
    assert reading.problems == ()
    assert reading.job_data["optimizer"].get("states", 2) == states


@pytest.mark.parametrize(
    ("said", "read_as"),
    [
        ("muon", (5, 1, 2, False)),
        ("muon --use-distributed-optimizer --muon-num-ns-steps 10", (10, 1, 2, True)),
        ("dist_muon --muon-scalar-optimizer lion", (5, 1, 1, True)),
        ("adaptive_muon", (5, 2, 2, False)),
    ],
)
def test_muon_is_read_by_its_steps_and_what_it_remembers(said: str, read_as: tuple[int, int, int, bool]) -> None:
    """Its products were said not to be priced, and its matrices to remember what Adam's do."""
    data = read(f"{SMALL} --optimizer {said}").job_data
    optimizer = data["optimizer"]
    found = (optimizer["muon_steps"], optimizer["matrix_states"], optimizer["states"])
    assert (*found, data["parallel"]["distributed_optimizer"]) == read_as


@pytest.mark.parametrize(
    ("said", "read_as"),
    [
        ("--offload-optimizer-states", (1.0, 0)),
        ("--chunked-optimizer-state-offload --optimizer-state-offload-chunk-size-mb 256", (1.0, 256)),
        ("--chunked-optimizer-state-offload --optimizer-state-offload-fraction 0.5", (0.5, 0)),
        ("--optimizer-state-offload-fraction 0.5", (None, None)),
    ],
)
def test_states_on_the_host_between_updates_are_read(said: str, read_as: tuple[float | None, int | None]) -> None:
    """Flags of Megatron's dev branch, which no release up to 0.19 has: they were not counted."""
    reading = read(f"{SMALL} --use-distributed-optimizer {said}")
    optimizer = reading.job_data["optimizer"]
    assert reading.problems == ()
    assert (optimizer.get("states_on_host"), optimizer.get("chunk_mib")) == read_as
    assert reading.given.unknown == ()
    beside = read(f"{SMALL} --use-distributed-optimizer {said} --optimizer sgd").problems
    assert bool(beside) == (read_as[0] is not None)


def test_the_job_of_a_launch() -> None:
    launch = f"torchrun --nproc-per-node 8 pretrain_gpt.py {SMALL} --tensor-model-parallel-size 2 --global-batch-size 64"
    job = job_of(read(launch, gpus=None), "a100-80g")
    assert (job.gpus, job.microbatches, job.cluster.name) == (8, 8, "a100-80g")


def test_a_job_that_does_not_add_up_and_a_cluster_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"must be a multiple of batch\.micro"):
        job_of(read(f"{SMALL} --global-batch-size 63"), "a100-80g")
    with pytest.raises(ConfigError, match="with which 2 names begin, needed a path, or one of a100-80g, a100-80g-pcie"):
        job_of(read(SMALL), "a100-80")


def test_megatrons_yaml_is_refused_by_name() -> None:
    assert "--yaml-cfg: found launch.yaml, needed a launch without it" in problems("--yaml-cfg launch.yaml")


@pytest.mark.parametrize(
    ("flags", "fusions"),
    [
        ("--swiglu", None),
        ("--swiglu --no-bias-dropout-fusion", ["bias_activation", "rope"]),
        ("--swiglu --no-bias-gelu-fusion", None),
        ("--no-bias-gelu-fusion --no-rope-fusion", ["bias_dropout"]),
        ("--disable-jit-fuser", ["rope"]),
        ("--no-masked-softmax-fusion", None),
        ("--transformer-impl local --no-masked-softmax-fusion", ["bias_dropout", "bias_activation", "rope"]),
    ],
)
def test_fusions_that_are_switched_off(flags: str, fusions: list[str] | None) -> None:
    """A profile is measured, or estimated, with the others."""
    assert facts(f"{SMALL} {flags}").get("model.fusions") == fusions
    if fusions is not None:  # a job is made of it, too
        assert job_of(read_launch(f"{SMALL} {flags}".split(), gpus=1), "a100-80g").model.fusions == tuple(fusions)


def test_norms_of_queries_and_keys_and_fp8_as_megatron_has_it() -> None:
    assert "model.qk_norm" not in facts(SMALL)
    assert facts(f"{SMALL} --qk-layernorm")["model.qk_norm"] is True
    fp8 = "--fp8-format e4m3 --fp8-amax-history-len 1024 --fp8-amax-compute-algo max"
    job = job_of(read(f"{SMALL} {fp8}"), "h100-80g")
    assert (job.model.fp8.format, job.model.fp8_recipe) == ("e4m3", "delayed")
    assert facts(f"{SMALL} {fp8} --fp8-recipe tensorwise")["model.fp8.recipe"] == "tensorwise"
    assert not job.model.fp8_parameters
    assert facts(f"{SMALL} {fp8} --fp8-param-gather --use-distributed-optimizer")["model.fp8.parameters"] is True
    assert "model.fp8" not in "".join(facts(f"{SMALL} --fp8-recipe tensorwise"))
    ends = facts(f"{SMALL} --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2")
    assert (ends["model.fp8.first_in_bf16"], ends["model.fp8.last_in_bf16"]) == (1, 2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--no-fp8-wgrad", "--no-fp8-wgrad: found given"),
        ("--fp8-recipe custom", "--fp8-recipe: found custom"),
    ],
)
def test_what_of_fp8_is_not_modelled_is_refused_where_it_is_on(flags: str, said: str) -> None:
    assert problems(f"{SMALL} {flags}") == ""
    assert said in problems(f"{SMALL} --fp8-format hybrid {flags}", planning=False)


@pytest.mark.parametrize("value", ["", "0", "-1", "x"])
@pytest.mark.parametrize(
    "flag",
    ["--context-parallel-size", "--make-vocab-size-divisible-by", "--num-virtual-stages-per-pipeline-rank", "--num-layers"],
)
def test_sizes_that_are_none_are_refused_and_nothing_is_divided_by_them(flag: str, value: str) -> None:
    assert problems(f"{SMALL} --pipeline-model-parallel-size 2 {flag} {value}").startswith(f"{flag}: found")


@given(st.lists(st.integers(1, 12), min_size=2, max_size=24))
def test_a_layout_that_is_printed_is_read_back(counts: list[int]) -> None:
    assert layers_of_layout(layout_text(counts)) == tuple(counts)


PIPELINE = f"{SMALL} --pipeline-model-parallel-size 4 --global-batch-size 16"


def test_the_schedule_is_our_own_flag() -> None:
    assert "schedule" not in facts(PIPELINE)
    assert facts(f"{PIPELINE} --lynx-schedule double-buffered")["schedule"] == "double_buffered"
    assert facts(f"{PIPELINE} --lynx-schedule=double-buffered --lynx-schedule flush")["schedule"] == "flush"
    job = job_of(read(f"{PIPELINE} --lynx-schedule double-buffered"), "a100-80g")
    assert (job.schedule, job.microbatches) == ("double_buffered", 4)


@pytest.mark.parametrize("said", ["--lynx-schedule gpipe", "--lynx-schedule", "--lynx-schedule --lr 1"])
def test_schedules_that_there_are_not(said: str) -> None:
    assert "--lynx-schedule: " in problems(f"{PIPELINE} {said}")


def test_too_few_micro_batches_for_two_versions() -> None:
    with pytest.raises(ConfigError) as caught:
        job_of(read(f"{PIPELINE} --lynx-schedule double-buffered --global-batch-size 12"), "a100-80g")
    assert "micro-batches of a pipeline (3) must be at least parallel.pipeline (4)" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--num-experts 8", "routers keep state"),
        ("--async-save", "weights move to other memory"),
        ("--rampup-batch-size 4 4 100", "as many micro-batches"),
        ("--rerun-mode validate_results", "none can be run again alone"),
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", "the forward of another version"),
    ],
)
def test_what_two_versions_do_not_go_with(flags: str, why: str) -> None:
    flag = next(word for word in reversed(flags.split()) if word.startswith("--"))
    assert why not in problems(f"{PIPELINE} {flags}")
    found = problems(f"{PIPELINE} --lynx-schedule double-buffered {flags}")
    assert any(line.startswith(f"{flag}: ") and why in line for line in found.splitlines()), found


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("--lynx-chek 2", "--lynx-chek: found no such flag, needed one of"),
        ("--lynx-check -1", "--lynx-check: found -1, needed how many steps, from 1, or frames, or frames:N"),
        ("--lynx-check frames:0", "--lynx-check: found frames:0, needed how many steps"),
        ("--lynx-trace-step", "--lynx-trace-step: expected one argument"),
        ("--transformer-impl inference_optimized", "needed local or transformer_engine"),
    ],
)
def test_what_the_launcher_would_refuse_is_refused_when_it_is_planned(said: str, answer: str) -> None:
    assert answer in problems(f"{PIPELINE} {said}")


def test_what_overlaps_is_read() -> None:
    """Flags that say what a job assumes anyway are no facts."""
    both = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    assert {place: value for place, value in facts(f"{SMALL} {both}").items() if place.startswith("overlap")} == {
        "overlap.gradients": True,
        "overlap.parameters": True,
    }
    chunks = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication"
    assert facts(f"{SMALL} {chunks}")["overlap.messages"] is False
    assert not [place for place in facts(SMALL) if place.startswith("overlap")]
    assert facts(f"{SMALL} --overlap-grad-reduce --no-align-grad-reduce")["overlap.aligned"] is False
    assert facts(f"{SMALL} --overlap-grad-reduce --ddp-bucket-size 20000000")["overlap.bucket_parameters"] == 20_000_000
    assert "--ddp-bucket-size: found 0" in problems(f"{SMALL} --ddp-bucket-size 0")
    buckets = facts(f"{SMALL} --overlap-grad-reduce --ddp-num-buckets 8 --ddp-pad-buckets-for-high-nccl-busbw")
    assert (buckets["overlap.buckets"], buckets["overlap.padded_buckets"]) == (8, True)
    assert "--ddp-num-buckets: found 0" in problems(f"{SMALL} --ddp-num-buckets 0")


@pytest.mark.parametrize("planning", [False, True])
def test_userbuffers_are_read_and_fewer_of_them_are_within_their_range(planning: bool) -> None:
    text = f"{SMALL} --tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --tp-comm-overlap-rs-dgrad"
    assert facts(text, planning=planning)["overlap.userbuffers"] is True
    reading = read_launch(shlex.split(text), gpus=4, planning=planning)
    assert dict(reading.priced_as)["--tp-comm-overlap-rs-dgrad"].startswith("userbuffers of all linears")
    without = read_launch(shlex.split(text.replace("--tp-comm-overlap ", "")), gpus=4, planning=planning)
    assert "--tp-comm-overlap-rs-dgrad" not in dict(without.priced_as)


def test_heads_activation_and_loss_are_read() -> None:
    found = facts(f"{SMALL} --kv-channels 128 --squared-relu --cross-entropy-loss-fusion --cross-entropy-fusion-impl te")
    assert (found["model.kv_channels"], found["model.activation"], found["model.cross_entropy"]) == (128, "squared_relu", "te")
    assert facts(f"{SMALL} --cross-entropy-loss-fusion")["model.cross_entropy"] == "native"
    assert "model.kv_channels" not in facts(f"{SMALL} --kv-channels 64"), "hidden / heads"


def test_deterministic_kernels_are_read_and_have_no_fused_loss() -> None:
    assert facts(f"{SMALL} --deterministic-mode")["model.deterministic"] is True
    assert "model.deterministic" not in facts(SMALL)
    assert problems(f"{SMALL} --deterministic-mode") == ""
    both = problems(f"{SMALL} --deterministic-mode --cross-entropy-loss-fusion")
    assert "--deterministic-mode: found also --cross-entropy-loss-fusion, needed one of them" in both


def test_userbuffers_are_not_recommended_to_deterministic_launches() -> None:
    """Megatron refuses them from 0.19 on: their sums have no fixed order."""
    flags = f"{SMALL} --tensor-model-parallel-size 2 --sequence-parallel"
    ours, others = (job_of(read(f"{flags} {more}"), "h100-80g") for more in ("--deterministic-mode", ""))
    assert offered(StockSetting(userbuffers=True), Facts.of(others))
    assert not offered(StockSetting(userbuffers=True), Facts.of(ours))
    assert "--tp-comm-overlap: found also --deterministic-mode" in problems(f"{flags} --deterministic-mode --tp-comm-overlap")


def test_flash_attention_is_another_kernel_than_transformer_engines_own() -> None:
    found = facts(f"{SMALL} --attention-backend flash")
    assert (found["model.attention"], found["model.attention_kernel"]) == ("flash", "flash_attention_2")
    assert "model.attention_kernel" not in facts(f"{SMALL} --attention-backend fused")


def test_whether_weight_gradients_may_be_deferred_is_read() -> None:
    assert facts(f"{SMALL} --no-gradient-accumulation-fusion")["overlap.weight_gradients"] == "none"
    assert "overlap.weight_gradients" not in facts(SMALL), "Megatron fuses them unless it is told not to"


HYBRID = ["--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec", "--hybrid-layer-pattern"]


@pytest.mark.parametrize(
    ("pattern", "layout"), [("*-*-*-*-|*-*-*-*-", "Et*4|t*4L"), ("*-*-*-|*-*-*-*-*-", "Et*3|t*5L"), ("*-" * 8, "Et*4|t*4L")]
)
def test_a_hybrid_stack_of_pairs_is_read_as_its_gpt(pattern: str, layout: str) -> None:
    """The same job, so the same plan; and where a plan moves layers, it says so by the pattern."""
    common = [word for word in words_of_hybrid() if word]
    gpt = read_launch([*common, "--num-layers", "8", "--pipeline-model-parallel-layout", layout])
    hybrid = read_launch([*common, *HYBRID, pattern])
    assert hybrid.problems == ()
    assert job_of(hybrid, "h100-80g") == job_of(gpt, "h100-80g")


@pytest.mark.parametrize("pattern", ["D-D-", "*E*E", "*-*", "*-*-||*-", "*-*-/MM", "*-*-/*-/*E"])
def test_other_hybrid_stacks_are_refused_by_name(pattern: str) -> None:
    problems = read_launch([*words_of_hybrid(), *HYBRID, pattern]).problems
    assert {problem.where for problem in problems} == {"--hybrid-layer-pattern"}


def test_parts_after_a_slash_predict_more_tokens() -> None:
    """As --mtp-num-layers says for a GPT; a layer that differs from the decoder's last one is counted as that one."""
    common = words_of_hybrid()
    layout = ["--num-layers", "8", "--pipeline-model-parallel-layout", "Et*4|t*4mL", "--mtp-num-layers", "1"]
    pattern = "*-*-*-*-|*-*-*-*-/*-"
    assert job_of(read_launch([*common, *HYBRID, pattern]), "h100-80g") == job_of(read_launch([*common, *layout]), "h100-80g")
    other = read_launch([*common, *HYBRID, "M-M-|*-M-/*-/*-"])
    assert (other.problems, other.job_data["model"]["mtp"]) == ((), 2)
    assert any("M-, the decoder's last layer, in place of *-" in said for _, said in other.priced_as)
    repeated = read_launch([*common, *HYBRID, "*-*-|*-*-/*-/*-", "--mtp-use-repeated-layer"])
    assert (repeated.problems, dict(repeated.priced_as).keys() >= {"--mtp-use-repeated-layer"}) == ((), True)


def test_a_pattern_under_its_older_names_is_the_same_pattern() -> None:
    """As published launches of Nemotron-H have it; where layers move, only the name of today remains."""
    common = words_of_hybrid()
    new = read_launch([*common, *HYBRID, "M-M-M-*-/*-/*-"])
    old = ["--hybrid-override-pattern", "M-M-M-*-", "--mtp-hybrid-override-pattern", "*-", "--mtp-num-layers", "2"]
    reading = read_launch([*common, "--is-hybrid-model", *old])
    assert reading.problems == ()
    assert job_of(reading, "h100-80g") == job_of(new, "h100-80g")
    job = job_of(new, "h100-80g")
    moved = job.model_copy(update={"parallel": job.parallel.model_copy(update={"pipeline": 1, "partition": None})})
    command = changed_command(reading, job, moved, uniform_plan(moved), "plan.yaml")
    assert "--hybrid-layer-pattern" in command
    assert "override-pattern" not in command
    both = read_launch([*common, *HYBRID, "M-", "--hybrid-override-pattern", "M-"])
    assert [problem.where for problem in both.problems] == ["--hybrid-override-pattern"]


@pytest.mark.parametrize(
    ("module", "name", "known"),
    [
        ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec", True),
        ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec", True),
        ("my.layer_specs", "mamba_stack_spec", False),
        ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_inference_stack_spec", False),
    ],
)
def test_specifications_of_hybrid_stacks(module: str, name: str, known: bool) -> None:
    words = [*words_of_hybrid(), "--is-hybrid-model", "--spec", module, name, "--hybrid-layer-pattern", "*-*-|*-*-"]
    assert [problem.where for problem in read_launch(words).problems] == ([] if known else ["--spec"])


def test_a_hybrid_stack_has_opaque_halves_and_experts() -> None:
    """M- M *E | - *- M: halves that nobody looks into, and halves that are not there."""
    experts = [
        "--num-experts",
        "8",
        "--moe-router-topk",
        "2",
        "--moe-token-dispatcher-type",
        "alltoall",
        "--mamba-num-heads",
        "128",
    ]
    reading = read_launch([*words_of_hybrid(), *HYBRID, "M-M*E|-*-M", *experts])
    assert reading.problems == ()
    model = job_of(reading, "h100-80g").model
    assert model.layers == 6
    assert model.opaque_layers == {"mamba": ("1-2", 6), "no_mlp": (2, 6), "no_attention": (4,)}
    assert model.expert_layers == {3}
    [mamba] = [each for each in model.opaque if each.kind == "mamba"]
    assert mamba.mamba == MambaSizes(heads=128, size=64, groups=8, state=128)
    inner, made = 128 * 64, 2 * 128 * 64 + 2 * 8 * 128 + 128
    parameters = planning_of(MAMBA).parameters(model, Parallel())
    assert parameters.cut == 4096 * (made + inner) + 5 * (inner + 2 * 8 * 128) + 3 * 128 + inner


def test_experts_of_a_latent_width() -> None:
    """As Nemotron 3 Super has them: experts and exchanges of that width, between two projections on every rank."""
    flags = f"{SMALL} --disable-bias-linear --num-experts 8 --moe-ffn-hidden-size 512 --moe-token-dispatcher-type alltoall"
    flags += " --expert-model-parallel-size 8"
    usual, narrow = (job_of(read(f"{flags} {more}"), "h100-80g") for more in ("", "--moe-latent-size 256"))
    assert (narrow.model.experts.latent, narrow.model.experts.whole) == (256, True)
    more, fewer = 2 * 1024 * 256, 2 * 512 * (1024 - 256)
    counted = [parameters.matrices + parameters.experts for parameters in (stage_parameters(job, 0) for job in (usual, narrow))]
    assert counted[1] - counted[0] == 8 * (more - fewer)
    exchanges = [analytic_profile(job).of(job.model.sections(1)[1]).exchange_s for job in (usual, narrow)]
    assert 0 < exchanges[1] < exchanges[0]


LINEAR = "--experimental-attention-variant gated_delta_net --linear-attention-freq 4"


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        (LINEAR, {"gated_delta_net": ("1-3", "5-7")}),
        (f"{LINEAR} --attention-output-gate", {"gated_delta_net": ("1-3", "5-7"), "gated_attention": (4, 8)}),
        ("--linear-attention-type gated_delta_net --linear-attention-freq [1]*2+[0]*6", {"gated_delta_net": ("1-2",)}),
        ("--attention-output-gate", {"gated_attention": ("1-8",)}),
    ],
)
def test_attention_that_nobody_looks_into(flags: str, layers: dict[str, Any]) -> None:
    reading = read(f"{SMALL} {flags}")
    assert (reading.problems, reading.given.unknown) == ((), ())
    assert job_of(reading, "h100-80g").model.opaque_layers == layers


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--experimental-attention-variant dsa", "found dsa, needed --multi-latent-attention, --dsa-indexer-n-heads"),
        ("--experimental-attention-variant gdn2", "found gdn2, needed none or gated_delta_net or gdn or dsa"),
        ("--experimental-attention-variant gated_delta_net", "needed --linear-attention-freq beside it"),
        ("--linear-attention-freq 4", "needed --experimental-attention-variant gated_delta_net beside it"),
    ],
)
def test_other_linear_attention_is_refused(flags: str, said: str) -> None:
    assert said in problems(f"{SMALL} {flags}")


def words_of_hybrid() -> list[str]:
    said = """torchrun --nproc-per-node 8 pretrain_hybrid.py --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --vocab-size 32000 --tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 32 --bf16
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --transformer-impl transformer_engine
    --attention-dropout 0 --hidden-dropout 0 --mock-data --lr 1e-4 --train-iters 10"""
    return said.split()


@pytest.mark.parametrize("flags", ["", "--tokenizer-type GPT2BPETokenizer --vocab-file nowhere.json"])
def test_a_launch_that_names_no_vocabulary_has_gpt2s(flags: str) -> None:
    found = read(f"{SMALL.replace('--vocab-size 50257', '')} {flags}")
    assert found.problems == ()
    [vocabulary] = [fact for fact in found.facts if fact.place == "model.vocab"]
    assert vocabulary.value == 50304
    assert "GPT-2's entries" in vocabulary.origin
