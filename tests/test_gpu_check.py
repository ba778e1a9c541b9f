"""The acceptance run for GPUs, as far as CPU ranks can run it: its parts pass, and what goes wrong on purpose is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_lynx.config.job import Job
from megatron_lynx.timeline import Span
from scripts.gpu_check.command import main
from scripts.gpu_check.machine import Machine, problems
from scripts.gpu_check.maker import plan_of
from scripts.gpu_check.mps import Refused
from scripts.gpu_check.overlap import hidden_share, recomputations_behind_collectives
from scripts.gpu_check.part import Part, Result
from scripts.gpu_check.parts import PUT_OFF, TE_PUT_OFF, parts
from scripts.gpu_check.places import Places
from scripts.gpu_check.running import Running, lacking
from scripts.gpu_check.trial import Setting
from tests import gpu_faults
from tests.long import long
from tests.te_releases import folder_of
from tests.tiny_jobs import tiny_job

pytestmark = pytest.mark.streams

H800 = "NVIDIA H800"
GPUS = Machine(dry=False, gpus=2, devices=(H800, H800), nccl="2.27.3")


def run(folder: Path, *arguments: str, of: Callable[[Machine], list[Part]] = parts) -> tuple[int, dict[str, Any], str]:
    """The exit status, and the results as JSON and as Markdown."""
    status = main(["--dry-run", "--out", str(folder), *arguments], of)
    return status, json.loads((folder / "results.json").read_text()), (folder / "results.md").read_text()


DRY_RUN = [
    "Transformer Engine",
    "one rank, offloading half by half",
    "order of copies, compute-sanitizer",
    "one rank of TP8",
    "fusions",
    "2 ranks meet",
    "TP2, sequence parallel",
    PUT_OFF,
    "PP2, offloading",
    "PP2, double-buffered, updates deferred",
    "EP2",
    "CP2",
    "side by side, TP2",
    "PP4",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dry_run(tmp_path: Path) -> None:
    status, results, page = run(tmp_path, "--parts", ";".join(DRY_RUN))
    assert status == 0, page
    found = {part["name"]: part for part in results["parts"]}
    assert list(found) == DRY_RUN
    assert {name: part["reason"] for name, part in found.items() if part["status"] == "skipped"} == {
        "Transformer Engine": "Transformer Engine is not installed",
        "order of copies, compute-sanitizer": "needs a GPU",
        "PP4": "needs 4 GPUs, this run has 2",
    }
    assert {part["status"] for part in found.values()} == {"passed", "skipped"}
    assert "are in every bit what their forward had saved" in found["PP2, offloading"]["reason"]
    assert [figures["share hidden"] > 0.5 for figures in found["TP2, sequence parallel"]["figures"]] == [True, True]
    assert found["one rank of TP8"]["figures"][0]["recomputations in windows"] > 0
    assert any(figures["bytes offloaded"] for figures in found["PP2, offloading"]["figures"])
    assert found["one rank, offloading half by half"]["figures"][0]["bytes offloaded"] > 0
    assert found["PP2, offloading"]["step_ratio_to_stock"] > 0
    assert found["side by side, TP2"]["reason"] == "rank 0: without a GPU: bits only"
    assert {*found["side by side, TP2"]["figures"][0]["step, s"]} == {"stock none", "stock full", "ours, on demand", "ours"}
    assert "DRY RUN" in results["note"]
    assert "DRY RUN" in page
    assert "**PASSED**: 11 passed, 0 failed, 3 skipped" in page
    assert "| PP4 | 4 | skipped |" in page
    assert "SHARED" not in page


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_dry_run_of_other_parts(tmp_path: Path) -> None:
    """Of which that of eight ranks and that of experts on two have more."""
    status, results, page = run(tmp_path, "--parts", "experts;PP2, two chunks;side by side, EP2")
    assert status == 0, page
    assert [part["status"] for part in results["parts"]] == ["passed"] * 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_that_share_a_gpu_stay_from_part_to_part_and_their_seconds_are_not_given(tmp_path: Path) -> None:
    chosen = [
        Part("2 ranks meet", "", 2, gpu_faults.where_it_is, opens=True),
        Part("again", "", 2, gpu_faults.where_it_is),
        Part("raises", "", 2, gpu_faults.raising),
        Part("afresh", "", 2, gpu_faults.where_it_is),
        Part("apart", "", 2, gpu_faults.where_it_is, apart=True),
    ]
    status, results, page = run(tmp_path, "--gpus", "1", "--ranks", "2", of=lambda machine: chosen)
    assert status == 1
    assert "RANKS SHARED GPUS: up to 2 ranks on 1." in page
    assert "RANKS SHARED GPUS" in results["note"]
    assert "NCCL_NET=Socket" in results["machine"]["NCCL where ranks share"]
    found = {part["name"]: part["figures"] for part in results["parts"]}
    first = found["2 ranks meet"]
    assert [figures["LOCAL_RANK"] for figures in first] == ["0", "0"]
    assert [figures["NCCL_HOSTID"] for figures in first] == ["rank-0", "rank-1"]
    processes = {name: {figures["process"] for figures in of} for name, of in found.items() if of}
    assert processes["again"] == processes["2 ranks meet"]
    assert len(processes["again"] | processes["afresh"] | processes["apart"]) == 6
    assert [part["step_ratio_to_stock"] for part in results["parts"]] == [None] * 5
    details = {part["name"]: part["details"] for part in results["parts"]}
    assert details["raises"].endswith("nccl-1 said\nNCCL WARN of rank 1")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_where_ranks_do_not_meet_other_parts_of_as_many_are_skipped(tmp_path: Path) -> None:
    names = ["meet", "as many", "more", "one"]
    ranks = dict(zip(names, (2, 2, 4, 1), strict=True))
    chosen = [Part(name, "", ranks[name], gpu_faults.raising, opens=name == "meet") for name in names]
    status, results, _ = run(tmp_path, "--gpus", "4", of=lambda machine: chosen)
    assert status == 1
    reason = "meet: failed, rank 1: ValueError: a rank that cannot go on"
    assert [(part["status"], part["reason"]) for part in results["parts"][1:]] == [
        ("skipped", reason),
        ("skipped", reason),
        ("passed", ""),
    ]


@contextmanager
def serving() -> Iterator[Mapping[str, str]]:
    """In MPS's place."""
    yield {"CUDA_MPS_PIPE_DIRECTORY": "/its/own"}


@contextmanager
def refusing() -> Iterator[Mapping[str, str]]:
    """The same, where there is none."""
    raise Refused("MPS: not here")
    yield {}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_part_that_is_refused_what_it_wants_beside_it_is_skipped_and_the_run_goes_on(tmp_path: Path) -> None:
    """Its ranks share the first GPU, whatever the run has."""
    chosen = [
        Part("refused", "", 2, gpu_faults.where_it_is, beside=refusing, one_gpu=True),
        Part("served", "", 2, gpu_faults.where_it_is, beside=serving, one_gpu=True),
        Part("as ever", "", 2, gpu_faults.where_it_is, one_gpu=True),
    ]
    status, results, page = run(tmp_path, "--gpus", "1", of=lambda machine: chosen)
    assert status == 0, page
    refused, shared, as_ever = results["parts"]
    assert (refused["status"], refused["reason"]) == ("skipped", "MPS: not here")
    assert shared["status"] == "passed"
    places = [(found["LOCAL_RANK"], found["NCCL_HOSTID"], found["CUDA_MPS_PIPE_DIRECTORY"]) for found in shared["figures"]]
    assert places == [("0", "rank-0", "/its/own"), ("0", "rank-1", "/its/own")]
    assert [found["CUDA_MPS_PIPE_DIRECTORY"] for found in as_ever["figures"]] == [None, None]


def test_ranks_with_a_gpu_each_are_left_to_nccl(tmp_path: Path) -> None:
    assert not {"NCCL_HOSTID", "NCCL_NET", "LOCAL_RANK"} & Places(tmp_path, 2, shared=False).environment(1).keys()


def test_a_setting_of_nccl_that_the_caller_makes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    found = Places(tmp_path, 2, shared=True).environment(3)
    assert (found["NCCL_SOCKET_IFNAME"], found["NCCL_NET"], found["LOCAL_RANK"]) == ("eth0", "Socket", "1")


OF_EIGHT_RANKS = [part.name for part in parts(Machine(dry=True, gpus=8, devices=(), nccl=None)) if part.ranks == 8]
MOST_OF_THEM = ("TP2 x PP4, sequence parallel, two chunks",)
"""What the other parts of eight ranks show of waiting for each other."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", [MOST_OF_THEM, *long([name for name in OF_EIGHT_RANKS if name not in MOST_OF_THEM])])
def test_eight_ranks(tmp_path: Path, names: Sequence[str]) -> None:
    """They are more than a CPU here has cores: nothing may depend on how far ranks are apart."""
    status, results, page = run(tmp_path, "--gpus", "8", "--parts", ";".join(names))
    assert status == 0, page
    assert [(part["name"], part["status"]) for part in results["parts"]] == [(name, "passed") for name in names]


OF_ITS_OWN = (
    "Transformer Engine, FP8, delayed",
    "latent attention, Transformer Engine",
    "TP2, sequence parallel, Transformer Engine",
    TE_PUT_OFF,
    "EP2, Transformer Engine",
    "CP2, Transformer Engine",
)
"""Parts that have what the other ones have of Transformer Engine's layers, and more."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("others", [False, *long(True)])
def test_transformer_engines_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: bool) -> None:
    """Its own Python, with a stand-in for what is compiled."""
    monkeypatch.syspath_prepend(folder_of("TRANSFORMER_ENGINE", "2.9", "transformer_engine"))
    names = [part.name for part in parts(GPUS) if part.lacking(GPUS) == "Transformer Engine is not installed" and part.ranks <= 2]
    assert set(OF_ITS_OWN) <= set(names)
    names = [name for name in names if (name in OF_ITS_OWN) != others]
    status, results, page = run(tmp_path, "--parts", ";".join(names))
    assert status == 0, page
    assert {part["status"] for part in results["parts"]} == {"passed"}, page
    for part in results["parts"]:
        if part["name"] == "TP2, sequence parallel, Transformer Engine":
            assert [figures["share hidden"] > 0.5 for figures in part["figures"]] == [True, True]


def tensor_parallel(**fields: Any) -> Setting:
    job: Job = tiny_job("gpt", tensor=2, layers=2, **fields)
    return Setting(job, plan_of(job), delay_s=0.002)


FAULTS = {
    "hangs": (gpu_faults.hanging, (), "hangs: no answer from ranks [1] within 5 s"),
    "raises": (gpu_faults.raising, (), "rank 1: ValueError: a rank that cannot go on"),
    "is killed": (gpu_faults.killed, (), "rank 1: ended without an answer (exit status -9)"),
    "another mask": (
        gpu_faults.with_other_masks,
        (tensor_parallel(),),
        "--lynx-check frames",
    ),
    "used too early": (gpu_faults.with_too_early_uses, (tensor_parallel(),), "values are not stock's in every bit, the first"),
    "no overlap": (
        gpu_faults.without_overlap,
        (tensor_parallel(),),
        "ran behind their collectives, needed 50%: overlap is missing",
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_goes_wrong_on_purpose_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each in processes of its own: those that hang are ended, and the next part runs."""
    faulty = [Part(name, "a fault", 2, function, given) for name, (function, given, _) in FAULTS.items()]
    hurried, others = faulty[:1], faulty[1:]
    status, results, page = run(tmp_path, "--limit", "5", of=lambda machine: hurried)
    assert status == 1
    assert "rank 1 is at" in page
    assert "in hanging" in page
    found = {part["name"]: part for part in results["parts"]}
    status, results, page = run(tmp_path, of=lambda machine: others)
    assert status == 1
    found |= {part["name"]: part for part in results["parts"]}
    assert {name: found[name]["status"] for name in FAULTS} == dict.fromkeys(FAULTS, "failed"), page
    said = capsys.readouterr().err
    for name, (_, _, says) in FAULTS.items():
        assert says in found[name]["reason"]
        assert f"gpu_check: {name} failed: " in said
    assert "gpu_faults.py" in found["raises"]["details"]
    assert "values are not stock's in every bit" in found["another mask"]["reason"]
    assert "not stock's" not in found["no overlap"]["reason"], "what runs too late is slow, never wrong"
    assert "| another mask | 2 | **FAILED** |" in page


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (GPUS, []),
        (replace(GPUS, gpus=3), ["--gpus: found 3, needed 1, 2, 4 or 8; there are parts for these numbers"]),
        (replace(GPUS, gpus=8), ["--gpus: found 8, and 2 on this machine, needed no more than there are; ask for 2"]),
        (
            replace(GPUS, devices=()),
            ["GPUs: found none that torch can use, needed one at least; with --dry-run this runs on CPU"],
        ),
        (
            replace(GPUS, devices=(H800, "NVIDIA L4")),
            ["GPUs: found device 0 is NVIDIA H800, device 1 is NVIDIA L4, needed one kind"],
        ),
        (replace(GPUS, gpus=1, devices=(H800, "NVIDIA L4")), []),
        (replace(GPUS, nccl=None), ["without NCCL, needed one with NCCL"]),
        (replace(GPUS, facts={"megatron-core": "none"}), ["megatron-core: found none installed, needed one of 0.16, "]),
        (replace(GPUS, facts={"megatron-core": "0.12.3"}), ["megatron-core: found 0.12.3, needed one of 0.16, 0.17, "]),
        (Machine(dry=True, gpus=8, devices=(), nccl=None), []),
        (replace(GPUS, asked=4), []),
        (replace(GPUS, asked=3), ["--ranks: found 3, needed 1, 2, 4 or 8; there are parts for these numbers"]),
        (replace(GPUS, asked=1), ["--ranks: found 1 for 2 GPUs, needed a rank for each GPU at least; ask for fewer --gpus"]),
        (replace(GPUS, gpus=4, devices=(H800,)), ["ask for 1; with --ranks 4 beside it, ranks share it"]),
    ],
    ids=[
        "fine",
        "three",
        "more than there are",
        "none",
        "two kinds",
        "one of two kinds",
        "no NCCL",
        "no Megatron",
        "an old Megatron",
        "dry",
        "shared",
        "three ranks",
        "a GPU without a rank",
        "what could share",
    ],
)
def test_a_run_that_cannot_begin_says_why(machine: Machine, says: list[str]) -> None:
    found = [str(problem) for problem in problems(machine)]
    assert len(found) == len(says)
    assert all(expected in problem for expected, problem in zip(says, found, strict=True))


BAD_INPUT = {
    "three GPUs": (["--gpus", "3"], "--gpus: found 3, needed 1, 2, 4 or 8"),
    "no such part": (["--parts", "TP2; TP3"], "--parts: found TP3, needed some of: one rank, gpt; "),
    "no name": (["--parts", ";"], "--parts: found no name, needed some of: one rank, gpt; "),
    "nothing that can run": (
        ["--parts", "PP4"],
        "--parts: found PP4, which needs 4 GPUs, this run has 2, needed a part that can run",
    ),
    "no time": (["--limit", "0"], "--limit: found 0, needed a number of seconds above 0"),
    "no limit": (["--limit", "inf"], "--limit: found inf, needed a number of seconds above 0"),
}


@pytest.mark.parametrize(("arguments", "says"), BAD_INPUT.values(), ids=BAD_INPUT)
def test_bad_input_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["--dry-run", "--out", str(tmp_path), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_known_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Running, "run", lambda *_: pytest.fail("a part runs"))
    (tmp_path / "in the way").touch()
    for out in (tmp_path / "in the way", tmp_path / "in the way" / "results"):
        assert main(["--dry-run", "--out", str(out)]) == 2
        assert f"{out}: found " in capsys.readouterr().err


def test_an_interrupted_run_leaves_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([Result(parts(GPUS)[0], "passed", "fine", 1.0)])

    def run_part(*_: Any) -> Result:
        for answer in answers:
            return answer
        raise KeyboardInterrupt

    monkeypatch.setattr(Running, "run", run_part)
    status, results, page = run(tmp_path)
    assert status == 130
    assert f"interrupted; 1 of {len(parts(GPUS))} parts are in {tmp_path}" in capsys.readouterr().err
    assert f"Not run, as the run ended before them: {'; '.join(part['name'] for part in results['parts'][1:])}." in page
    assert [part["status"] for part in results["parts"]] == ["passed", *["not run"] * (len(parts(GPUS)) - 1)]
    assert results["passed"] is False
    assert "**NOT FINISHED**: 1 passed, 0 failed, 0 skipped, " in page
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "results.md"]


def test_a_second_run_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUT", raising=False)
    for number in (1, 2):
        assert main(["--dry-run"], lambda machine: []) == 0
        assert len(list(tmp_path.glob("build/gpu-dry-run-*/results.md"))) == number


def test_transformer_engine_is_skipped_where_it_is_not_known() -> None:
    of_te = next(part for part in parts(GPUS) if part.name == "Transformer Engine")
    assert lacking(of_te, GPUS) == "Transformer Engine is not installed"
    assert lacking(of_te, replace(GPUS, te="2.9.0")) is None
    assert "Transformer Engine 9.1 is not known; 2." in str(lacking(of_te, replace(GPUS, te="9.1")))


def test_fp8_is_skipped_where_the_device_does_not_compute_in_it() -> None:
    fp8 = next(part for part in parts(GPUS) if part.name == "Transformer Engine, FP8, delayed")
    old, new = (replace(GPUS, te="2.9.0", facts={"compute capability": of}) for of in ("8.0", "9.0"))
    assert (lacking(fp8, old), lacking(fp8, new)) == ("compute capability 8.0, FP8 needs 8.9", None)


def test_a_module_that_is_missing_is_named() -> None:
    program = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('scripts.gpu_check', run_name='__main__')"
    ended = subprocess.run([sys.executable, "-c", program, "--dry-run"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "found no module torch, needed torch with CUDA and NCCL, megatron-core, and what `pip install -e" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_every_number_of_gpus_has_parts_and_they_have_names_of_their_own() -> None:
    there = parts(GPUS)
    assert {part.ranks for part in there} == {1, 2, 4, 8}
    assert len({part.name for part in there}) == len(there)


def test_the_share_of_recomputations_behind_collectives() -> None:
    assert hidden_share([(0, 2), (5, 6)], [(0, 1), (0.5, 1.5), (5, 9)]) == pytest.approx(2.5 / 3)
    assert hidden_share([(0, 2)], [(2, 3)]) == 0
    assert hidden_share([], [(0, 1)]) == 0


def test_recomputations_behind_other_waits_are_not_judged_by_collectives() -> None:
    spans = [Span("recompute", 1, 2, 1, None, 0, window) for window in ("bwd.mlp.0@2", "pipe.recv_backward", "on_demand", None)]
    assert recomputations_behind_collectives([*spans, Span("window", 0, 3, 1, None, 0, "bwd.mlp.0@2")]) == [(1, 2)]
