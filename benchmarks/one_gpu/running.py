"""Runs one subject in a process of its own, and goes on with the settings that are left where one ended the process.

a setting raises, or memory runs out     its row says so; the next one has its turn in the same process
it breaks the device, or the process     its row says so; a fresh process goes on with the settings behind it
time is over                             the settings that are left are named
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.one_gpu.results import AGAIN, Results
from benchmarks.one_gpu.settings import Setting, settings_of
from benchmarks.one_gpu.subjects import Subject
from megatron_lynx.testbed.candidates import NONE, Candidate
from megatron_lynx.testbed.fusions import compiles
from megatron_lynx.testbed.ranks import RankError, run_ranks

MOST_PROCESSES = 4
GRACE_S = 30.0
"""How much longer than its time a process may take before it is ended."""


def run_subject(subject: Subject, folder: Path, until_s: float, steps: int, *, dry: bool, only: Sequence[str] = ()) -> Results:
    """Measures a subject until `until_s` (`time.time`). `only`: parts of names of settings; none: all."""
    settings, refused = settings_of(subject)
    if only:
        settings = [each for each in settings if each.candidate == NONE or any(part in each.name for part in only)]
    results = Results(subject.name, subject.shows, not_run=refused)
    results.predicted = {each.name: as_json(each) for each in settings}
    results.write(folder)
    candidates = [each.candidate for each in settings]
    offloading = [each for each in candidates if "offload_modules" in each.fields]
    left = [*(each for each in candidates if each not in offloading), _again(NONE), *offloading]
    for _ in range(MOST_PROCESSES):
        left, results = _run_process(subject, left, folder, until_s, steps, dry=dry)
        if not left:
            break
    results.not_run |= {candidate.name: "processes ended before it" for candidate in left}
    results.write(folder)
    return results


def as_json(setting: Setting) -> dict[str, Any]:
    predicted = setting.predicted
    return {**asdict(predicted), "peak_bytes": predicted.peak_bytes}


def _again(candidate: Candidate) -> Candidate:
    return Candidate(AGAIN + candidate.name, candidate.fields, candidate.plan)


def _run_process(
    subject: Subject, left: list[Candidate], folder: Path, until_s: float, steps: int, *, dry: bool
) -> tuple[list[Candidate], Results]:
    """The settings that are left when a process has ended, and all results so far."""
    env: dict[str, str] = {}
    if subject.uses_te:
        env |= {"NVTE_CPU_OFFLOAD_V1": "1"}  # Megatron asks for it where it offloads; nothing else reads it
    if subject.repeatable:
        env |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if dry:
        env |= {"CUDA_VISIBLE_DEVICES": ""}
    compiled = not dry and compiles(subject.job)
    limit_s = max(1.0, until_s - time.time()) + GRACE_S
    try:
        run_ranks(
            measure, 1, subject, left, str(folder), until_s, steps, pin=False, timeout_s=limit_s, env=env, compiled=compiled
        )
    except (RankError, TimeoutError) as error:
        return _left_behind(left, folder, subject, error)
    return [], Results.read(folder, subject.name)


def _left_behind(left: list[Candidate], folder: Path, subject: Subject, error: Exception) -> tuple[list[Candidate], Results]:
    results = Results.read(folder, subject.name)
    named = results.under_way or left[0].name
    if not any(row["setting"] == named for row in results.rows):
        results.rows.append({"setting": named, "passes_s": None, "error": _last_lines(str(error))})
    results.under_way = None
    results.write(folder)
    print(f"  {named}: the process ended: {_last_lines(str(error), 1)}", flush=True)
    names = [candidate.name for candidate in left]
    behind = left[names.index(named) + 1 :] if named in names else left[1:]
    return behind, results


def _last_lines(text: str, count: int = 12) -> str:
    return "\n".join([line for line in text.strip().splitlines() if line.strip()][-count:])


# --- in the rank's process ---------------------------------------------------------------------------------------------


def measure(rank: int, subject: Subject, left: list[Candidate], folder: str, until_s: float, steps: int) -> None:
    """Runs inside `run_ranks`, and writes what it finds after every setting."""
    import torch

    from benchmarks.one_gpu.measured import Measuring, Row, free_memory
    from benchmarks.one_gpu.trained import Trained, sums_in_place
    from tests.instruments.groups import initialise

    results = Results.read(Path(folder), subject.name)
    _join(subject)
    initialise(subject.job)
    with sums_in_place():
        begin_s = time.perf_counter()
        trained = Trained(subject)
        results.facts |= _facts(trained) | {"building_s": time.perf_counter() - begin_s}
        measuring, longest_s = Measuring(trained, steps, results.bits), 0.0
        for candidate in left:
            if time.time() + longest_s > until_s:
                results.not_run[candidate.name] = "time was over"
                continue
            results.under_way = candidate.name
            results.write(Path(folder))
            row = Row(candidate.name)
            try:
                measuring.row(candidate, row)
            except Exception as error:  # noqa: BLE001 (whatever it is: it is recorded, and the next setting has its turn)
                row.error = _said(error)
                traceback.clear_frames(error.__traceback__)
            longest_s = max(longest_s, row.seconds)
            results.rows.append(row.as_json)
            results.under_way = None
            results.write(Path(folder))
            _say(row.as_json, results.predicted.get(candidate.name))
            free_memory()
            if torch.cuda.is_available():
                torch.zeros(1, device="cuda").item()  # raises where the device is broken: a fresh process goes on


def _join(subject: Subject) -> None:
    """Where this rank is alone, the others are emulated."""
    if subject.alone:
        from megatron_lynx.testbed.groups import join_alone

        join_alone(subject.job.gpus)


def _said(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {_last_lines(str(error), 6)} ({Path(where.filename).name}:{where.lineno})"


def _facts(trained: Any) -> dict[str, Any]:
    import torch

    from megatron_lynx.measure.measurement import Links, this_machine
    from megatron_lynx.testbed.fusions import fusions_of

    job = trained.job
    return {
        "machine": str(this_machine(Links(kind="none"), trained.device)),
        "layers": job.model.implementation,
        "fusions": list(fusions_of(job)),
        "parameters": sum(parameter.numel() for _, parameter in trained.gradients()),
        "built_bytes": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
    }


def _say(row: Mapping[str, Any], predicted: Mapping[str, Any] | None) -> None:
    if row["passes_s"] is None:
        print(f"  {row['setting']}: {row['error']}", flush=True)
        return
    beside = "" if predicted is None else f" (predicted {1e3 * predicted['passes_s']:.1f})"
    size = f", peak {row['peak_bytes'] / 1e9:.2f} GB" if row["peak_bytes"] is not None else ""
    wrong = f"; {row['error']}" if row["error"] else ""
    print(f"  {row['setting']}: {1e3 * row['passes_s']:.1f} ms{beside}{size}, {row['seconds']:.0f} s{wrong}", flush=True)
