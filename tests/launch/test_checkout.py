"""The real `pretrain_gpt.py` of a Megatron-LM checkout, 0.16 to 0.19, as it is.

MEGATRON_LM_DIR names the checkout. Local layers and Transformer Engine's, mock data, dropout 0.1, five iterations: what is
printed under a plan equals stock's, and in the first two, which are checked, so does every gradient; also behind a checkpoint
that is resumed under another plan. A broken recomputation is found.
"""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path

import pytest

from megatron_lynx.anatomy import ATTENTION, Facts, sections_of
from megatron_lynx.measure.run_outcome import FILE_NAME, load_outcome
from tests.deferring import deferring
from tests.tiny_jobs import tiny_job
from tests.uniform import uniform_plan

from ..long import long
from ..transparency.checkpoints import ahead, checkpointed, with_rest_in_wait
from ..transparency.opaque_layers import delta_net_in
from .checkouts import FOUR, INTERLEAVED, check_every_digit, minor_of, te_for, under_plans
from .launched import (
    EXPERTS,
    LATENT,
    LAYOUTS,
    MODEL,
    SIZE,
    TE,
    Launched,
    flags_of,
    inside_experts,
    keeping_rows,
    launch,
    offloading,
    plan_of,
    saved,
)
from .test_patches import apply

DOUBLE_BUFFERED = ["--rerun-mode", "disabled", "--lynx-schedule", "double-buffered"]


@pytest.mark.parametrize("layout", ["1", FOUR, INTERLEAVED])
def test_every_printed_digit_is_stocks(script, layout, tmp_path):
    check_every_digit(script, [*MODEL, "--mock-data"], layout, tmp_path)


@pytest.mark.parametrize("layout", [FOUR, INTERLEAVED])
def test_with_experts(script, layout, tmp_path):
    """Their routers' biases move from step to step, and count tokens: a checked step leaves both as they were."""
    check_every_digit(script, [*MODEL, *EXPERTS, "--mock-data"], layout, tmp_path, experts=True)


def test_with_overlapped_exchanges(script, tmp_path):
    """Megatron's combined schedule, of a script that hands it the model's nodes; tensor-parallel ranks gather again."""
    overlapped = ["--bf16", "--no-masked-softmax-fusion", "--overlap-moe-expert-parallel-comm"]
    flags = [*MODEL, *EXPERTS, "--mock-data", *overlapped, *flags_of(INTERLEAVED)]
    stock = launch(script, flags, ranks=4)
    assert len(stock.iterations) == 5, stock.text
    plan = plan_of(INTERLEAVED, overlapped=True, gather="once")
    assert {"linear_qkv", "experts_activation"} <= {item for rule in plan.stages[1].rules for item in rule.recompute}
    for name, made in {"recomputed": plan, "on the host": offloading(plan, 200_000)}.items():
        under = ["--lynx-plan", saved(made, tmp_path / f"{name}.yaml"), "--lynx-check", "2"]
        planned = launch(script, [*flags, *under], ranks=4)
        assert planned.status == 0, planned.text
        assert planned.iterations == stock.iterations


def test_overlapped_exchanges_on_one_stage_with_copies_to_the_host(script, tmp_path):
    """A micro-batch leaves half by half while the one before comes back."""
    overlapped = ["--bf16", "--no-masked-softmax-fusion", "--overlap-moe-expert-parallel-comm"]
    flags = [*MODEL, *EXPERTS, "--mock-data", *overlapped]
    plan = offloading(plan_of("expert 2", overlapped=True), 1 << 20, pace=1 << 16, experts=True)
    [(planned, _)] = under_plans(script, flags, "expert 2", [plan], tmp_path)
    assert "copied to the host" in planned.ours[-1]


def test_experts_fall_back_when_more_rows_come_than_a_plan_holds_for(script, tmp_path):
    """It holds for a balanced load, to which routers do not keep; in checked steps, too."""
    plan = keeping_rows(plan_of("expert 2", experts=True))
    held = tuple(stage.model_copy(update={"experts_hold": 1.0}) for stage in plan.stages)
    plan = plan.model_copy(update={"stages": held})
    flags = [*MODEL, *EXPERTS, "--mock-data", "--tensorboard-dir", str(tmp_path)]
    [(planned, _)] = under_plans(script, flags, "expert 2", [plan], tmp_path)
    assert re.search(r"experts: \d+ halves of a step fell back on stage 0, whose bytes hold for less", planned.text), planned.text


@pytest.mark.parametrize("layout", [FOUR, INTERLEAVED])
def test_with_transformer_engine(script, layout, tmp_path):
    """Its own Python, its compiled extension stood in for."""
    flags = [*MODEL, *TE, "--mock-data"]
    check_every_digit(script, flags, layout, tmp_path, path=[te_for(script)], implementation="transformer_engine")


def test_checkpoints_go_on_in_waits(script, tmp_path):
    """A gradient is gathered beside the rest of an MLP half; gradients of what experts returned travel beside that of theirs.
    Without dropout behind a half, as backward would read its mask before."""
    dry = ["--mock-data", "--hidden-dropout", "0.0"]
    sliced, spread = "tensor 2, sequence parallel", "expert 2"
    te = checkpointed(plan_of(sliced, implementation="transformer_engine"), "layer")
    plans = [with_rest_in_wait(te), with_rest_in_wait(ahead(te, how="gather"))]
    dense = [*under_plans(script, [*MODEL, *TE, *dry], sliced, plans, tmp_path, path=[te_for(script)])]
    experts = ahead(checkpointed(plan_of(spread, experts=True), "layer", (2, 3, 4)), expert=2)
    spread_out = [*under_plans(script, [*MODEL, *EXPERTS, *dry], spread, [with_rest_in_wait(experts)], tmp_path)]
    assert (len(dense), len(spread_out)) == (2, 1)


@pytest.mark.parametrize("layout", [FOUR, *long(INTERLEAVED)])
def test_with_userbuffers(script, layout, tmp_path):
    """The script asks Transformer Engine for them, whose Python makes them; buffers and products are stood in for. A plan for a
    run without them is refused."""
    flags = [*MODEL, *TE, "--mock-data", "--tp-comm-overlap", "--tp-comm-bootstrap-backend", "gloo"]
    facts = {"implementation": "transformer_engine"}
    check_every_digit(script, flags, layout, tmp_path, path=[te_for(script)], userbuffers=True, **facts)
    wrong = saved(plan_of(layout, **facts), tmp_path / "wrong.yaml")
    refused = launch(script, [*flags, *flags_of(layout), "--lynx-plan", wrong], ranks=4, path=[te_for(script)])
    assert refused.status == 1
    assert refused.ours[1].startswith("  - --tp-comm-overlap: found given, needed not given"), refused.text


def test_a_hybrid_model_of_pairs(script, tmp_path):
    """`pretrain_hybrid.py`, which 0.18 and 0.19 have: the plans are the GPT's, and so is what is said."""
    hybrid = script.parent / "pretrain_hybrid.py"
    if not hybrid.is_file():
        pytest.skip(f"no pretrain_hybrid.py in {script.parent}: it is there from 0.18 on")
    spec = ["--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    flags = [*MODEL, *TE, "--mock-data", *spec, "--hybrid-layer-pattern", "*-*-|*-*-"]
    check_every_digit(hybrid, flags, FOUR, tmp_path, path=[te_for(script)], implementation="transformer_engine")


MIXED = shlex.split(
    "--mamba-num-heads 8 --mamba-head-dim 8 --mamba-num-groups 2 --mamba-state-dim 8 --linear-conv-kernel-dim 4 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8 --swiglu "
    "--ffn-hidden-size 256"
)
OF_MIXED = [{"kind": "mamba", "layers": [1, 4], "mamba": {"heads": 8, "size": 8, "groups": 2, "state": 8}}, *delta_net_in([3])]
"""The same in a job."""
KERNELS = {
    "layernorm_gated": "from tests.instruments.mamba import RMSNorm",
    "ssd_combined": "from tests.instruments.mamba import split_conv1d_scan as mamba_split_conv1d_scan_combined\n"
    "mamba_chunk_scan_combined = None",
}
"""Of a package that Megatron imports them from when it is itself imported, which is before a script begins."""


def kernels_of_mamba(folder):
    package = folder / "mamba_ssm" / "ops" / "triton"
    package.mkdir(parents=True)
    for name, text in {**KERNELS, "__init__": "", "../__init__": "", "../../__init__": ""}.items():
        package.joinpath(f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize("layout", ["tensor 2, sequence parallel", "pipeline 2", *long(FOUR)])
def test_a_hybrid_model_of_mamba_layers_and_delta_nets(script, layout, tmp_path):
    """`pretrain_hybrid.py` of 0.19 as it is, with stand-ins for kernels."""
    hybrid = script.parent / "pretrain_hybrid.py"
    if not hybrid.is_file() or minor_of(script.parent) != "19":
        pytest.skip(f"no pretrain_hybrid.py with delta nets in {script.parent}: it is there from 0.19 on")
    segments = "M-*-|G-M-" if "pipeline" in layout else "M-*-G-M-"
    spec = ["--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec", "--hybrid-layer-pattern", segments]
    facts = LAYOUTS[layout]
    precision = ["--bf16"] if facts.get("dtype") == "bf16" else []
    job = tiny_job("gpt", **facts | SIZE, implementation="transformer_engine", activation="swiglu", opaque=OF_MIXED)
    plans = [uniform_plan(job, gather="once"), checkpointed(uniform_plan(job, "none"), "attention", [1, 3, 4])]
    run = {"path": [script.parent, te_for(script), kernels_of_mamba(tmp_path)], "env": {"SCRIPT": str(hybrid)}}
    mixed, flags = Path(__file__).with_name("pretrain_mixed.py"), [*MODEL, *TE, *MIXED, *spec, *precision, "--mock-data"]
    for planned, _ in under_plans(mixed, flags, layout, plans, tmp_path, **run):
        assert planned.ours[-1].startswith("megatron-lynx: rank 0 recomputed ")


def test_with_latent_attention(script, tmp_path):
    """And with a layer that predicts one more token, which keeps all. Of the others everything between norms and the projection
    is made again, of two paths, queries turned in place; tokens that were compressed are gathered once."""
    flags = [*MODEL, *TE, *LATENT, "--mock-data"]
    check_every_digit(script, flags, FOUR, tmp_path, path=[te_for(script)], implementation="transformer_engine", latent=True)


@pytest.mark.parametrize("recipe", ["delayed", *long("tensorwise", "blockwise")])
def test_with_weights_that_are_held_in_fp8(script, recipe, tmp_path):
    """The script makes their main parameters of what they were before, and gathers them in FP8. (Of weights that were made on the
    CPU Transformer Engine remembers what was in their memory before.)"""
    model = [flag for flag in MODEL if flag != "--use-cpu-initialization"]
    held = ["--bf16", "--fp8-format", "hybrid", "--fp8-recipe", recipe, "--fp8-param-gather", "--use-distributed-optimizer"]
    facts = {"implementation": "transformer_engine", "fp8": recipe, "held": True}
    check_every_digit(script, [*model, *TE, *held, "--mock-data"], "1", tmp_path, path=[te_for(script)], **facts)


def test_with_deferred_weight_gradients_of_experts(script, tmp_path):
    """Of attention and of each expert, into exchanges of tokens and collectives. They are added up where they lie, as on GPUs, by
    a stand-in for the extension that does it."""
    flags = [flag for flag in MODEL if flag != "--no-gradient-accumulation-fusion"]
    flags += [*EXPERTS, "--mock-data", *flags_of(FOUR)]
    run = partial(launch, Path(__file__).with_name("pretrain_faulty.py"), ranks=4, path=[script.parent])
    run = partial(run, env={"FAULT": "none", "SCRIPT": str(script)})
    deferred = (*ATTENTION.linears, *sections_of(Facts(experts=True))[1].linears)
    plan = deferring(inside_experts(plan_of(FOUR, gather="once", experts=True)), deferred)
    assert plan.parallel.expert == 2
    assert {"experts_fc1", "experts_fc2"} <= set(plan.stages[1].rule_for(4).weight_gradients)
    stock = run(flags)
    assert len(stock.iterations) == 5, stock.text
    planned = run([*flags, "--lynx-plan", saved(plan, tmp_path / "plan.yaml"), "--lynx-check", "2"])
    assert planned.status == 0, planned.text
    assert planned.iterations == stock.iterations
    assert planned.ours[1].startswith("megatron-lynx: checked 2 steps against stock without recomputation: in each, ")
    # 5 steps x 4 micro-batches x (2 layers' attention with 2 linears, 1 layer with 2 experts of 2)
    assert planned.ours[-1].endswith("; deferred 160 weight gradients: 160 ran in waits, 0 were flushed"), planned.text


def test_with_context_parallelism(script, tmp_path):
    """The script cuts its batches among ranks; of its layers only the core attention is stood in for."""
    layout, cut = "context 2 x pipeline 2", Path(__file__).with_name("pretrain_cut.py")
    flags, where = [*MODEL, "--mock-data", *flags_of(layout)], {"path": [script.parent], "env": {"SCRIPT": str(script)}}
    stock = launch(cut, flags, ranks=4, **where)
    assert len(stock.iterations) == 5, stock.text
    recomputing = plan_of(layout)
    for name, plan in {"recomputed": recomputing, "on the host": offloading(recomputing, 200_000, pace=40_000)}.items():
        under = ["--lynx-plan", saved(plan, tmp_path / f"{name}.yaml"), "--lynx-check", "2"]
        planned = launch(cut, [*flags, *under], ranks=4, **where)
        assert planned.status == 0, planned.text
        assert planned.iterations == stock.iterations
        assert any(line.startswith("megatron-lynx: checked 2 steps against stock") for line in planned.ours)
        assert any("copied to the host" in line for line in planned.ours) == (name == "on the host")


@pytest.mark.timeout(900)
def test_a_run_resumes_under_another_plan(script, tmp_path):
    """Saved under a plan at step 3, against stock that resumes what stock saved."""
    flags = [*MODEL, "--mock-data", *flags_of(INTERLEAVED)]
    once, keep = plan_of(INTERLEAVED, gather="once"), plan_of(INTERLEAVED)
    plans = {"once": once, "keep": keep, "offload": offloading(keep, 200_000)}
    under = {name: ["--lynx-plan", saved(plan, tmp_path / f"{name}.yaml")] for name, plan in plans.items()} | {"stock": []}
    until_3 = ["--save-interval", "3", "--exit-interval", "3"]
    for name in ("stock", "once"):
        begun = launch(script, [*flags, *under[name], "--save", tmp_path / name, *until_3], ranks=4)
        assert [number for number, _, _ in begun.iterations] == ["1", "2", "3"], begun.text
    expected = launch(script, [*flags, "--load", tmp_path / "stock"], ranks=4).iterations
    assert [number for number, _, _ in expected] == ["4", "5"]
    for name in ("keep", "offload", "stock"):
        resumed = launch(script, [*flags, *under[name], "--load", tmp_path / "once"], ranks=4)
        assert resumed.iterations == expected, resumed.text


def test_a_broken_recomputation_is_named(script, tmp_path):
    plan = saved(plan_of(FOUR, gather="once"), tmp_path / "plan.yaml")
    flags = [*MODEL, "--mock-data", *flags_of(FOUR), "--lynx-plan", plan, "--lynx-check", "2"]
    faulty = Path(__file__).with_name("pretrain_faulty.py")
    broken = launch(faulty, flags, ranks=4, path=[script.parent], env={"FAULT": "recompute", "SCRIPT": str(script)})
    assert broken.status == 1
    assert broken.ours[-1].startswith("  - decoder.layers.2.self_attention.linear_proj.weight on stage 1 (rank "), broken.text
    assert broken.iterations == []


def test_frames_are_checked(script, tmp_path):
    """Recomputed, gathered once and, in part, on the host: nothing printed changes. Of a broken recomputation, what it made is
    named."""
    flags = [*MODEL, "--mock-data", *flags_of(INTERLEAVED)]
    plan = saved(offloading(plan_of(INTERLEAVED, gather="once"), 200_000, pace=40_000), tmp_path / "plan.yaml")
    stock = launch(script, flags, ranks=4)
    checked = [*flags, "--lynx-plan", plan, "--lynx-check", "frames:3"]
    planned = launch(script, checked, ranks=4)
    assert (stock.status, planned.status) == (0, 0), planned.text
    assert planned.iterations == stock.iterations
    assert len(stock.iterations) == 5
    summary = next(line for line in planned.ours if line.startswith("megatron-lynx: checked "))
    assert re.search(r"checked \d\d frames in 3 steps on 4 ranks, of all \d+ kinds of frames: \d+ tensors", summary)
    assert "copied to the host" in planned.ours[-1], "inputs of halves, from which recomputes begin"
    faulty = Path(__file__).with_name("pretrain_faulty.py")
    broken = launch(faulty, checked, ranks=4, path=[script.parent], env={"FAULT": "recompute", "SCRIPT": str(script)})
    assert broken.status == 1
    assert broken.ours[-1].startswith("  - step 1, layer 3, attention half, core_attention, micro-batch 0 ("), broken.text
    assert broken.iterations == []


@pytest.mark.parametrize(
    ("flags", "steps"),
    [(["--exit-interval", "3"], 3), (["--exit-signal-handler"], 1), ([*DOUBLE_BUFFERED, "--exit-interval", "3"], 3)],
    ids=["interval", "signal", "interval, without flushes"],
)
def test_a_run_that_megatron_stops_says_how_it_came_out(script, tmp_path, flags, steps):
    """Its loop exits by itself, with status 0. No group over gloo is made beside Megatron's, which were forbidden."""
    schedule = "double_buffered" if "--lynx-schedule" in flags else "flush"
    plan = saved(plan_of("pipeline 4", schedule=schedule), tmp_path / "plan.yaml")
    flags = [*MODEL, "--mock-data", *flags_of("pipeline 4"), *flags, "--lynx-plan", plan, "--lynx-outcome", tmp_path / FILE_NAME]
    flags += ["--disable-gloo-process-groups", "--tensorboard-dir", tmp_path / "logs"]
    faulty = Path(__file__).with_name("pretrain_faulty.py")
    env = {"FAULT": "signal" if "--exit-signal-handler" in flags else "none", "RANK_OF_FAULT": "1", "SCRIPT": str(script)}
    stopped = launch(faulty, flags, ranks=4, path=[script.parent], env=env)
    assert stopped.status == 0, stopped.text
    assert f"megatron-lynx: how this run of {steps} steps came out" in stopped.text
    assert stopped.ours[-1].startswith("megatron-lynx: rank 0 recomputed ")
    found = load_outcome(tmp_path / FILE_NAME)
    assert (found.finished, found.reports[-1].when, found.reports[-1].step) == (True, "end", steps)


def test_patched_and_without_the_launcher(script, tmp_path):
    """Applied and taken back, twice; in between it trains, under a plan and without."""
    twin = twin_of(script.parent, tmp_path / "twin")
    published = script.read_text()
    run = partial(launch, twin, module="tests.launch.without_launcher")
    flags = [*MODEL, "--mock-data"]
    stock = run(flags)
    assert len(stock.iterations) == 5, stock.text
    plan = saved(plan_of("1"), tmp_path / "plan.yaml")
    for ours in (["--lynx-plan", plan], []):
        assert apply(twin.parent)[0] == 0
        patched = run([*flags, *ours])
        assert patched.iterations == stock.iterations, patched.text
        assert [line.split(":")[0] for line in patched.ours[-1:]] == ["megatron-lynx"] * bool(ours)
        assert apply("--reverse", twin.parent)[0] == 0
        assert twin.read_text() == published


def twin_of(checkout: Path, folder: Path) -> Path:
    """The script of a checkout that looks the same, and may be patched."""
    folder.mkdir()
    for entry in checkout.iterdir():
        (folder / entry.name).symlink_to(entry)
    script = folder / "pretrain_gpt.py"
    script.unlink()
    script.write_text((checkout / script.name).read_text())
    return script


DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce"]


def without_flushes(script: Path, layout: str, flags: list[str], ranks: int, **more) -> tuple[Launched, Launched]:
    """The version rule, applied to the flushing loop by hand, and the launcher; `more`: `plan`, `path`, `drained`, `ours`."""
    flags = [*MODEL, "--mock-data", *flags_of(layout), "--rerun-mode", "disabled", *flags]
    path, drained = [script.parent, *more.get("path", ())], more.get("drained", "5")
    versions = Path(__file__).with_name("pretrain_versions.py")
    expected = launch(versions, flags, ranks=ranks, path=path, env={"SCRIPT": str(script), "DRAINED": drained})
    flags += ["--lynx-schedule", "double-buffered", *more.get("ours", ())]
    flags += ["--lynx-plan", more["plan"]] if "plan" in more else []
    without = launch(script, flags, ranks=ranks, path=path)
    assert (expected.status, without.status) == (0, 0), expected.text + without.text
    assert without.iterations == expected.iterations != []
    return expected, without


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("pipeline 2", []),
        ("pipeline 2", ["--calculate-per-token-loss"]),
        ("pipeline 4", DISTRIBUTED),
    ],
    ids=["pipeline 2", "per token", "pipeline 4, distributed optimizer"],
)
def test_without_flushes(script, layout, flags):
    """Every printed digit is that of the version rule."""
    without_flushes(script, layout, flags, LAYOUTS[layout]["pipeline"])


def test_without_flushes_with_transformer_engine_under_a_plan(script, tmp_path):
    """Everything recomputed, and some on the host."""
    plan = offloading(plan_of(FOUR, implementation="transformer_engine", schedule="double_buffered"), 20_000)
    _, planned = without_flushes(script, FOUR, TE, 4, path=[te_for(script)], plan=saved(plan, tmp_path / "plan.yaml"))
    assert "recomputed 80 layer halves" in planned.ours[-1]
    assert "copied to the host" in planned.ours[-1]


def test_without_flushes_saved_and_resumed(script, tmp_path):
    """Of a run that is drained behind the third batch."""
    flags = ["--hidden-dropout", "0", "--attention-dropout", "0"]
    saving = ["--save", tmp_path, "--save-interval", "3"]
    _, undrained = without_flushes(script, FOUR, flags, 4, drained="3,5", ours=saving)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    _, resumed = without_flushes(script, FOUR, [*flags, "--load", str(tmp_path)], 4)
    assert [norm for _, _, norm in resumed.iterations] == [norm for _, _, norm in undrained.iterations[3:]]
