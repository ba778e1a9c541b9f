"""Jobs: files that name files, overrides, and every problem at once."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from textwrap import indent

import pytest

from megatron_lynx.config import Job, load_job
from megatron_lynx.config.loader import bundled_configs
from megatron_lynx.errors import ConfigError
from tests.tiny_jobs import tiny_job

from .jobs import catalogued_job

JOB = """\
model: models/tiny-llama
cluster: {name: here, device: cpu, memory_gib: 1e1}
gpus: 2
parallel: {tensor: 2}
batch: {micro: 1, global: 4}
"""


def refusals(tmp_path: Path, text: str, **overrides: object) -> list[str]:
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_job(tmp_path / "job.yaml", overrides)
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


@pytest.mark.parametrize("name", sorted(file.stem for file in (bundled_configs() / "jobs").glob("*.yaml")))
def test_bundled_jobs_are_valid(name: str) -> None:
    assert isinstance(load_job(f"jobs/{name}"), Job)


def test_parts_inline_and_by_name_agree(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    named = load_job(tmp_path / "job.yaml")
    (tmp_path / "mine.yaml").write_text((bundled_configs() / "models" / "tiny-llama.yaml").read_text())
    beside = load_job(tmp_path / "job.yaml", {"model": "mine"})
    assert (named.model.layers, named.cluster.memory_gib, named.microbatches) == (4, 10.0, 4)
    assert named == beside
    assert named.digest == beside.digest


def test_overrides_reach_into_named_files(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    job = load_job(tmp_path / "job.yaml", {"model.layers": 6, "batch.micro": 2, "budget.activation_mib": 5})
    assert (job.model.layers, job.batch.micro, job.budget.activation_mib) == (6, 2, 5.0)


def test_a_named_file_with_other_values(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("models/tiny-llama", "{like: models/tiny-llama, layers: 6}"))
    (tmp_path / "overridden.yaml").write_text(JOB)
    job = load_job(tmp_path / "job.yaml")
    assert job.model.layers == 6
    assert job == load_job(tmp_path / "overridden.yaml", {"model.layers": 6})


def test_what_a_named_file_cannot_be_like(tmp_path: Path) -> None:
    unknown = JOB.replace("models/tiny-llama", "{like: models/tiny-lama, layers: 6}")
    [found] = refusals(tmp_path, unknown)
    assert found.startswith("job.yaml: model.like: ")
    assert found.endswith("did you mean tiny-llama?")
    [found] = refusals(tmp_path, JOB.replace("models/tiny-llama", "{like: 3}"))
    assert found == "job.yaml: model.like: found 3, needed a name, as models/NAME, or a path"
    [found] = refusals(tmp_path, JOB.replace("models/tiny-llama", "{like: models/tiny-llama, layrs: 6}"))
    assert found.endswith("did you mean layers?")


def test_all_problems_of_all_files(tmp_path: Path) -> None:
    (tmp_path / "wide.yaml").write_text("layers: 0\nhiden: 64\n")
    found = refusals(
        tmp_path, JOB.replace("models/tiny-llama", "wide").replace("tensor: 2", "tensr: 2").replace("gpus: 2", "gpus: x")
    )
    assert "wide.yaml: layers: found 0, needed at least 1" in found
    assert any(
        line.startswith("wide.yaml: hiden: found an unknown key") and line.endswith("did you mean hidden?") for line in found
    )
    assert any(line.startswith("job.yaml: parallel.tensr: ") and line.endswith("did you mean tensor?") for line in found)
    assert "job.yaml: gpus: found 'x', needed a whole number" in found
    assert not any(line.startswith("job.yaml: model") for line in found)


def test_an_unknown_name_lists_what_exists(tmp_path: Path) -> None:
    (found,) = refusals(tmp_path, JOB.replace("tiny-llama", "tiny-lama"))
    assert found.startswith("job.yaml: model: found no file 'models/tiny-lama', needed a path, or one of ")
    assert found.endswith("did you mean tiny-llama?")


def test_several_rules_of_one_model_are_several_problems(tmp_path: Path) -> None:
    found = refusals(tmp_path, JOB, **{"parallel.tensor": 3, "gpus": 3})
    assert "job.yaml: model.heads (8) must be a multiple of parallel.tensor (3), such as 1, 2, 4" in found
    assert "job.yaml: model.ffn (1408) must be a multiple of parallel.tensor (3), such as 1, 2, 4" in found


def test_overrides_are_blamed_for_their_own_problems(tmp_path: Path) -> None:
    found = refusals(tmp_path, JOB, **{"batch.micro": 0, "gpus.more": 1, "colour.deep": 3})
    assert "override batch.micro: found 0, needed at least 1" in found
    assert "override gpus.more: found a single value above it, needed a mapping at gpus" in found
    assert any(line.startswith("override colour.deep: found an unknown key") for line in found)


def test_layouts_that_do_not_divide_are_answered_with_some_that_do(tmp_path: Path) -> None:
    found = refusals(tmp_path, JOB, **{"parallel.pipeline": 3, "gpus": 6})
    assert found == ["job.yaml: model.layers (4) must be a multiple of parallel.pipeline (3), such as 1, 2, 4"]
    found = refusals(tmp_path, JOB, **{"parallel.pipeline": 2, "parallel.layers_per_chunk": 3, "gpus": 4})
    assert found == ["job.yaml: layers of a stage (2) must be a multiple of parallel.layers_per_chunk (3), such as 1, 2"]
    found = refusals(tmp_path, JOB, **{"parallel.pipeline": 2, "parallel.layers_per_chunk": 1, "gpus": 4, "batch.global": 3})
    assert found == [
        "job.yaml: micro-batches of a pipeline (3) must be a multiple of parallel.pipeline (2) with several chunks on each stage"
    ]
    assert refusals(tmp_path, JOB, **{"parallel.layers_per_chunk": 2}) == [
        "job.yaml: parallel: layers_per_chunk needs pipeline > 1, found pipeline 1"
    ]


def test_devices_and_batches_that_do_not_divide_are_answered_with_some_that_do(tmp_path: Path) -> None:
    assert refusals(tmp_path, JOB, **{"parallel.pipeline": 2, "gpus": 5}) == [
        "job.yaml: gpus (5) must be a multiple of parallel.tensor x parallel.context x parallel.pipeline (4), such as 4 or 8"
    ]
    (found,) = refusals(tmp_path, JOB, **{"batch.micro": 2, "batch.global": 5})
    assert found == "job.yaml: batch.global (5) must be a multiple of batch.micro x replicas (2), such as 4 or 6"


@pytest.mark.parametrize(
    ("place", "figure", "needed"),
    [
        ("budget.memory_gib", 1e300, "at most 1e+09"),
        ("budget.activation_mib", 1e300, "at most 1e+12"),
        ("model.layers", 10**12, "at most 1000"),
        ("batch.global", 10**12, "at most 1e+08"),
    ],
)
def test_figures_beyond_any_machine_are_refused_not_computed_with(tmp_path: Path, place: str, figure: float, needed: str) -> None:
    assert refusals(tmp_path, JOB, **{place: figure}) == [f"override {place}: found {figure!r}, needed {needed}"]


def test_a_plan_could_not_say_so_many_micro_batches(tmp_path: Path) -> None:
    (found,) = refusals(tmp_path, JOB, **{"batch.micro": 1, "batch.global": 10**8})
    assert found.endswith("must be no more than 20000: enlarge batch.micro, or use more gpus")


@pytest.mark.parametrize(
    ("ratio", "answer"),
    [
        (1.5, "found 1.5, needed at most 1"),
        ("half", "found 'half', needed one of auto or a number"),
        ("auot", "found 'auot', needed one of auto or a number; did you mean auto?"),
    ],
)
def test_a_number_or_a_word_is_answered_once_and_with_both(tmp_path: Path, ratio: float | str, answer: str) -> None:
    assert refusals(tmp_path, JOB, offload_ratio=ratio) == [f"override offload_ratio: {answer}"]


def test_a_partition_gives_every_virtual_stage_its_layers() -> None:
    job = tiny_job("gpt", pipeline=2)
    uneven = job.model_copy(update={"parallel": job.parallel.model_copy(update={"partition": (3, 1)})})
    assert [list(uneven.layers_of(stage)) for stage in range(2)] == [[1, 2, 3], [4]]
    turns = job.model_copy(update={"parallel": job.parallel.model_copy(update={"partition": (1, 1, 1, 1)})})
    assert turns.chunks == 2
    assert [list(turns.layers_of(stage, chunk)) for chunk in range(2) for stage in range(2)] == [[1], [2], [3], [4]]
    assert [turns.layers_on(stage) for stage in range(2)] == [2, 2]


def test_an_open_partition_is_even_until_a_plan_says_more(tmp_path: Path) -> None:
    assert tiny_job(pipeline=4, layers=7, partition="auto").partition == (1, 2, 2, 2)
    assert tiny_job(pipeline=2, layers=8, microbatches=4, layers_per_chunk=2, partition="auto").partition == (2, 2, 2, 2)
    assert refusals(tmp_path, JOB, **{"parallel.pipeline": 8, "parallel.partition": "auto", "gpus": 16}) == [
        "job.yaml: model.layers (4) must be at least parallel.pipeline (8)"
    ]


def test_a_partition_must_cover_the_model(tmp_path: Path) -> None:
    assert refusals(tmp_path, JOB, **{"parallel.pipeline": 2, "parallel.partition": [3, 2], "gpus": 4}) == [
        "job.yaml: parallel.partition [3, 2] has 5 layers, but model.layers is 4"
    ]
    assert refusals(tmp_path, JOB, **{"parallel.pipeline": 2, "parallel.partition": [2, 1, 1], "gpus": 4}) == [
        "job.yaml: parallel: partition has 3 numbers, but pipeline 2 needs a multiple of 2"
    ]


PIPELINE = JOB.replace("tensor: 2", "pipeline: 2") + "schedule: double_buffered\n"


def test_without_flushes(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(PIPELINE)
    job = load_job(tmp_path / "job.yaml")
    assert (job.schedule, job.defer_updates, job.microbatches) == ("double_buffered", True, 4)
    flushing = load_job(tmp_path / "job.yaml", {"schedule": "flush"})
    assert flushing.digest != job.digest


def test_two_versions_need_a_micro_batch_for_every_stage(tmp_path: Path) -> None:
    (found,) = refusals(tmp_path, PIPELINE, **{"batch.global": 1})
    assert "micro-batches of a pipeline (1) must be at least parallel.pipeline (2)" in found


def test_two_versions_cannot_be_interleaved(tmp_path: Path) -> None:
    (found,) = refusals(tmp_path, PIPELINE, **{"parallel.layers_per_chunk": 1})
    assert "parallel makes 2 chunks of each stage, schedule double_buffered needs 1 chunk" in found


def test_one_stage_has_no_flush(tmp_path: Path) -> None:
    (found,) = refusals(tmp_path, JOB, schedule="double_buffered")
    assert "parallel.pipeline (1) has no flush to leave out" in found


def test_a_flush_has_nothing_to_defer(tmp_path: Path) -> None:
    (found,) = refusals(tmp_path, JOB, defer_updates=False)
    assert "defer_updates is false, but schedule flush" in found


def test_unknown_schedules(tmp_path: Path) -> None:
    found = "\n".join(refusals(tmp_path, JOB, schedule="double-buffered"))
    assert "schedule: found 'double-buffered', needed one of flush, double_buffered" in found


def test_groups_of_micro_batches_that_megatron_refuses(tmp_path: Path) -> None:
    chunked = {"parallel.pipeline": 2, "parallel.layers_per_chunk": 1, "gpus": 4}
    assert refusals(tmp_path, JOB, **{"parallel.microbatch_group": 2}) == [
        "job.yaml: parallel: microbatch_group (2) needs several chunks on each stage, found one: give layers_per_chunk too"
    ]
    assert refusals(tmp_path, JOB, **chunked, **{"parallel.microbatch_group": 1}) == [
        "job.yaml: parallel: microbatch_group (1) must be at least pipeline (2)"
    ]
    asked = {**chunked, "parallel.microbatch_group": 3, "batch.global": 4}
    needed = "in groups of parallel.microbatch_group (3), the last of at least parallel.pipeline (2),"
    assert refusals(tmp_path, JOB, **asked) == [
        f"job.yaml: micro-batches of a pipeline (4) must be {needed} with several chunks on each stage"
    ]


def test_fp8_needs_an_engine_two_bytes_and_one_version_of_the_weights(tmp_path: Path) -> None:
    both = {"model.fp8": {"recipe": "delayed"}, "model.implementation": "transformer_engine"}
    implementation, dtype = refusals(tmp_path, JOB, **{"model.fp8": {}, "model.dtype": "fp32"})
    assert "fp8 needs implementation transformer_engine, found local" in implementation
    assert "fp8 needs dtype bf16, found fp32" in dtype
    (found,) = refusals(tmp_path, PIPELINE, **both, **{"model.dtype": "bf16"})
    assert "model.fp8: weights have copies in FP8, of one version" in found


def test_experts_need_a_schedule_that_flushes(tmp_path: Path) -> None:
    """Such jobs were planned, and the launch refused the plans."""
    (found,) = refusals(tmp_path, PIPELINE, **{"model.experts": EXPERTS | {"layers": "all"}})
    assert "model.experts: routers keep state from batch to batch, schedule double_buffered has two in flight" in found


def test_keys_with_their_defaults_are_not_in_a_jobs_digest() -> None:
    """So plans still match their jobs when jobs get new keys."""
    job = load_job("jobs/llama-7b-h800-80g")
    told = job.model_copy(update={"cluster": job.cluster.model_copy(update={"host_time": None})})
    same = {"model.qk_norm": False, "model.experts": None, "parallel.expert": 1, "batch.lengths": None, "model.fusions": []}
    assert load_job("jobs/llama-7b-h800-80g", same).digest == told.digest == job.digest
    sizes = {"kv_rank": 512, "head_size": 128, "rope_size": 64, "value_head_size": 128}
    latent = {"model.kv_groups": 32, "model.latent": sizes}
    changed = ("model.qk_norm", "model.deterministic", "overlap.gradients", "parallel.scattered_messages")
    changes = [{}, {"model.fp8": {}}, latent, {**latent, "model.latent": {**sizes, "fused_rotary": True}}]
    digests = [load_job("jobs/llama-7b-h800-80g", one).digest for one in (*changes, *({place: True} for place in changed))]
    assert len(set(digests)) == len(digests)


EXPERTS = {"count": 8, "per_token": 2, "ffn": 128, "layers": ["2-3", 4]}


def test_experts_are_in_the_layers_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    spread = {"parallel.tensor": 1, "parallel.expert": 2}
    job = load_job(tmp_path / "job.yaml", {"model.experts": EXPERTS, **spread})
    assert (job.model.moe_layers, job.parallel.expert_tensor_size) == (("2-4",), 1)
    every_second = {**EXPERTS, "layers": 2}
    assert load_job(tmp_path / "job.yaml", {"model.experts": every_second, **spread}).model.moe_layers == (1, 3)
    assert load_job(tmp_path / "job.yaml", {"model.experts": None}).digest == load_job(tmp_path / "job.yaml").digest


@pytest.mark.parametrize("span", ["1-99999999999", "1-99999999999999999999999", 99999999999])
def test_a_mistyped_range_of_layers_is_answered_at_once(tmp_path: Path, span: str | int) -> None:
    """Every layer of it was listed first, in all of the memory."""
    (found,) = refusals(tmp_path, JOB, **{"model.experts": EXPERTS | {"layers": [span]}, "parallel.tensor": 1})
    first = 5 if isinstance(span, str) else span
    assert found == f"job.yaml: model.experts.layers names layer {first}, but model.layers is 4"


def test_experts_that_megatron_cannot_spread(tmp_path: Path) -> None:
    wrong = {"count": 9, "per_token": 2, "ffn": 129, "shared_ffn": 33, "layers": ["2-9"]}
    found = refusals(tmp_path, JOB, **{"model.experts": wrong, "parallel.expert": 4})
    assert [problem.removeprefix("job.yaml: ") for problem in found] == [
        "model.experts.count (9) must be a multiple of parallel.expert (4)",
        "model.experts.ffn (129) must be a multiple of parallel.expert_tensor (2)",
        "model.experts.shared_ffn (33) must be a multiple of parallel.tensor (2)",
        "model.experts.layers names layer 5, but model.layers is 4",
        "gpus (2) must be a multiple of parallel.expert_tensor x parallel.expert x parallel.pipeline (8)",
        "parallel.tensor (2) with experts needs parallel.sequence_parallel: true, found false",
    ]
    assert refusals(tmp_path, JOB, **{"parallel.expert": 2}) == ["job.yaml: parallel.expert (2) needs model.experts, found none"]
    in_fp8 = {"model.fp8": {}, "model.implementation": "transformer_engine", "model.dtype": "bf16", "parallel.tensor": 1}
    assert refusals(tmp_path, JOB, **in_fp8, **{"model.experts": {**EXPERTS, "ffn": 72}}) == [
        "job.yaml: model.experts.ffn on a rank (72) must be a multiple of 16 with model.fp8"
    ]
    assert refusals(tmp_path, JOB, **{"model.experts": {**EXPERTS, "filled": True}, "parallel.sequence_parallel": True}) == [
        "job.yaml: model.experts.filled needs model.fp8, found none: rows are filled up for FP8 alone"
    ]
    assert "layers has 'x', needed a layer" in refusals(tmp_path, JOB, **{"model.experts": {**EXPERTS, "layers": ["x"]}})[0]


@pytest.mark.parametrize(
    ("cluster", "recipe", "said"),
    [
        ("a100-80g", "delayed", "model.fp8 is delayed, but the GPUs of cluster a100-80g have no FP8"),
        ("h800-80g", "mxfp8", "model.fp8.recipe is mxfp8, but the GPUs of cluster h800-80g take delayed, tensorwise, blockwise"),
    ],
)
def test_gpus_without_fp8_are_refused_with_both_facts(cluster: str, recipe: str, said: str) -> None:
    catalogued_job("llama-65b", "h800-80g", fp8="blockwise")
    with pytest.raises(ValueError, match=re.escape(said)):
        catalogued_job("llama-65b", cluster, fp8=recipe)


def test_layers_that_stay_in_bf16_as_megatron_has_them() -> None:
    fields = {"implementation": "transformer_engine", "dtype": "bf16", "pipeline": 2}
    with pytest.raises(
        ValueError, match=re.escape("model.fp8.last_in_bf16 (3) must be at most model.layers / parallel.pipeline (2)")
    ):
        tiny_job(**fields, fp8={"recipe": "tensorwise", "last_in_bf16": 3})
    with pytest.raises(ValueError, match="need another recipe than delayed"):
        tiny_job(**fields, fp8={"first_in_bf16": 1})


def test_sizes_that_fp8_matrices_cannot_have() -> None:
    with pytest.raises(ValueError, match=re.escape("model.ffn / parallel.tensor (24) must be a multiple of 16 with model.fp8")):
        tiny_job(implementation="transformer_engine", dtype="bf16", fp8={}, ffn=24)


HALF = """\
  none: {forward_us: 1, backward_us: 2}
  full: {forward_us: 1, backward_us: 3}
  kept: {forward_us: 1, backward_us: 2}
  partly: {forward_us: 1, backward_us: 3}
  recomputed: {forward_us: 1, backward_us: 4}
"""
HOST = f"cpu: a CPU\nlocal:\n  made_by: a person\n  attention:\n{indent(HALF, '  ')}  mlp:\n{indent(HALF, '  ')}"


def with_host(folder: Path, host: str, name: str = "host") -> Path:
    """A job in a folder of its own, on a cluster there that names a file of host time."""
    (folder / "host.yaml").write_text(host)
    (folder / "cluster.yaml").write_text(f"name: ours\ndevice: cpu\nmemory_gib: 8\nhost_time: {name}\n")
    batch = "batch: {micro: 1, global: 2}"
    (folder / "job.yaml").write_text(f"model: models/tiny-gpt\ncluster: cluster\ngpus: 1\n{batch}\n")
    return folder / "job.yaml"


def test_a_host_file_has_figures_of_both_kinds_of_layers(tmp_path: Path) -> None:
    layer = f"  made_by: a person\n  attention:\n{indent(HALF, '  ')}  mlp:\n{indent(HALF, '  ')}"
    slower = layer.replace("backward_us: 4", "backward_us: 9")
    host_time = load_job(with_host(tmp_path, f"cpu: a CPU\nlocal:\n{layer}transformer_engine:\n{slower}")).cluster.host_time
    assert host_time is not None
    recomputed_us = [host_time.of(kind).mlp.recomputed.backward_us for kind in host_time.measured]
    assert recomputed_us == [4, 9]


def test_a_cluster_names_the_host_time_of_its_nodes(tmp_path: Path) -> None:
    host_time = load_job(with_host(tmp_path, HOST)).cluster.host_time
    assert host_time is not None
    assert host_time.of("local").mlp.under("recomputed").seconds.backward_s == pytest.approx(4e-6)
    assert load_job(with_host(tmp_path, HOST), {"cluster.memory_gib": 4}).cluster.host_time == host_time


@pytest.mark.parametrize(
    ("host", "name", "problem"),
    [
        (HOST.replace("{forward_us: 1, backward_us: 4}", "{forward_us: -1, backward_us: 4}"), "host", "forward_us: found -1"),
        (HOST.replace("    kept: {forward_us: 1, backward_us: 2}\n", ""), "host", "kept: found nothing, needed this key"),
        ("cpu: a CPU\n", "host", "there are no layers: give local, or transformer_engine, or both"),
        (HOST, "hosst", "cluster.yaml: host_time: found no file 'hosst'"),
    ],
)
def test_a_host_time_that_cannot_be_is_refused_by_its_place(tmp_path: Path, host: str, name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_job(with_host(tmp_path, host, name))
    assert any(problem in str(each) for each in refusal.value.problems), refusal.value.problems


def test_what_megatron_does_not_overlap_is_refused(tmp_path: Path) -> None:
    (found,) = refusals(tmp_path, JOB, **{"overlap.parameters": True})
    assert "parameters true needs gradients: true (--overlap-grad-reduce), found false" in found
    (found,) = refusals(tmp_path, JOB, **{"overlap.parameters": True, "overlap.gradients": True})
    assert "overlap.parameters needs parallel.distributed_optimizer: true, found false" in found
    (found,) = refusals(tmp_path, JOB, **{"overlap.userbuffers": True, "parallel.tensor": 2})
    assert "overlap.userbuffers needs parallel.sequence_parallel: true, found false" in found
    (found,) = refusals(tmp_path, JOB, **{"parallel.scattered_messages": True, "parallel.sequence_parallel": True})
    assert "scattered_messages needs sequence_parallel: false, found true" in found


def test_lengths_of_packed_sequences_in_a_file(tmp_path: Path) -> None:
    """Or as their mean; a job without any is the job that it was."""
    (tmp_path / "lengths.txt").write_text("100 300\n200\n")
    (tmp_path / "job.yaml").write_text(JOB.replace("global: 4", "global: 4, lengths: lengths.txt"))
    lengths = load_job(tmp_path / "job.yaml").batch.lengths
    assert lengths is not None
    assert (lengths.mean, lengths.mean_square) == (200, (100**2 + 300**2 + 200**2) / 3)
    (tmp_path / "job.yaml").write_text(JOB)
    plain = load_job(tmp_path / "job.yaml")
    assert plain.digest != load_job(tmp_path / "job.yaml", {"batch.lengths": {"mean": 8}}).digest
    assert plain.digest == load_job(tmp_path / "job.yaml", {"batch.lengths": None}).digest


@pytest.mark.parametrize(
    ("content", "said"), [("", "found no lengths"), ("5 0", "found a length of 0"), ("5 many", "'many'"), (None, "no such file")]
)
def test_a_file_of_lengths_that_does_not_read(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "lengths.txt").write_text(content)
    [problem] = refusals(tmp_path, JOB.replace("global: 4", "global: 4, lengths: lengths.txt"))
    assert "lengths.txt: found" in problem
    assert said in problem


def test_squares_are_at_least_those_of_equal_lengths(tmp_path: Path) -> None:
    [problem] = refusals(tmp_path, JOB.replace("global: 4", "global: 4, lengths: {mean: 8, mean_square: 60}"))
    assert "mean_square (60) must be at least the square of mean (64)" in problem


def test_copies_with_other_values_have_other_hashes() -> None:
    """A hash is computed once for each object; neither copies nor pickles take it along."""
    job = tiny_job("llama")
    known = hash(job), hash(job.model)
    other = job.model_copy(update={"gpus": 2 * job.gpus, "model": job.model.model_copy(update={"layers": 3})})
    assert hash(other) == hash(Job.model_construct(job.model_fields_set, **vars(other))) != known[0]
    assert hash(other.model) != known[1]
    assert not hasattr(pickle.loads(pickle.dumps(job)), "_known_hash")
    assert {job: 1}[pickle.loads(pickle.dumps(job))] == 1
