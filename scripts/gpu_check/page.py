"""The results as one page: JSON for programs, Markdown to paste into an issue. Both are there, and whole, all through the run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from megatron_lynx.errors import ConfigError, Problem, in_words
from megatron_lynx.whole_file import write_whole
from scripts.gpu_check.machine import CANNOT_BEGIN, Machine
from scripts.gpu_check.part import Result

DRY = "DRY RUN ON CPU RANKS, tiny sizes: this shows that the script runs. It is no measurement of a GPU."
SHARED = (
    "RANKS SHARED GPUS: up to {ranks} ranks on {gpus}. Their contexts take turns on the device, and sockets join them. Where a "
    "part has more than {gpus} ranks, its bits, frames, order, hangs and bytes mean what they always do; its seconds, and which "
    "share ran behind collectives, mean nothing."
)

MOST_LINES = 60
"""Of the details of a part that failed; results.json has all."""


def failed(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.status == "failed"]


def unfinished(results: Sequence[Result]) -> bool:
    return any(result.status == "not run" for result in results)


def write_page(machine: Machine, results: Sequence[Result], folder: Path) -> str:
    """`results.json` and `results.md` in `folder`; the latter's text. Raises `ConfigError` where they cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(CANNOT_BEGIN, [Problem(str(folder), in_words(error), "a folder for the results")]) from error
    text = markdown(machine, results)
    write_whole(folder / "results.json", json.dumps(as_json(machine, results), indent=2) + "\n")
    write_whole(folder / "results.md", text)
    return text


def as_json(machine: Machine, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "note": " ".join(_notes(machine)),
        "passed": not failed(results) and not unfinished(results),
        "gpus": list(machine.devices[: machine.gpus]),
        "ranks": machine.ranks,
        "nccl": machine.nccl,
        "machine": machine.facts,
        "parts": [
            {
                "name": result.part.name,
                "shows": result.part.shows,
                "ranks": result.part.ranks,
                "status": result.status,
                "reason": result.reason,
                "seconds": round(result.seconds, 1),
                "shared": machine.shared_by(result.part.ranks),
                "step_ratio_to_stock": _ratio(result, machine),
                "memory_ratio_to_stock": result.memory_ratio,
                "stock_s": [answer.stock_s for answer in result.answers],
                "ours_s": [answer.ours_s for answer in result.answers],
                "stock_bytes": [answer.stock_bytes for answer in result.answers],
                "ours_bytes": [answer.ours_bytes for answer in result.answers],
                "figures": [dict(answer.figures) for answer in result.answers],
                "details": result.details,
            }
            for result in results
        ],
    }


def markdown(machine: Machine, results: Sequence[Result]) -> str:
    counts = Counter[str](result.status for result in results)
    verdict = "FAILED" if failed(results) else "NOT FINISHED" if unfinished(results) else "PASSED"
    statuses = ("passed", "failed", "skipped", *(["not run"] if unfinished(results) else []))
    counted = ", ".join(f"{counts[status]} {status}" for status in statuses)
    lines = [f"# megatron-lynx acceptance run, {date.today()}", ""]
    if not machine.dry:
        lines += [f"{machine.gpus} x {machine.devices[0]}, NCCL {machine.nccl}.", ""]
    for note in _notes(machine):
        lines += [note, ""]
    lines += [f"**{verdict}**: {counted}", ""]
    lines += [f"* {name}: {value}" for name, value in machine.facts.items()]
    lines += ["", "| part | ranks | | seconds | step / stock | memory / stock | |", "|---|---|---|---|---|---|---|"]
    lines += [_row(result, machine) for result in results if result.status != "not run"]
    if left := [result.part.name for result in results if result.status == "not run"]:
        lines += ["", f"Not run, as the run ended before them: {'; '.join(left)}."]
    lines += [
        "",
        "Step and memory are ours by stock's without recomputation. So small, recomputations cost more than at real sizes.",
    ]
    for result in results:
        if result.details:
            lines += ["", f"{result.part.name}:", "", "```", *result.details.splitlines()[-MOST_LINES:], "```"]
    return "\n".join(lines) + "\n"


def _notes(machine: Machine) -> list[str]:
    """What a reader must know before he reads a figure."""
    shared = SHARED.format(ranks=machine.ranks, gpus=machine.gpus) if machine.shared_by(machine.ranks) else ""
    return [note for note in (DRY if machine.dry else "", shared) if note]


def _ratio(result: Result, machine: Machine) -> float | None:
    return None if machine.shared_by(result.part.ranks) else result.ratio


def _row(result: Result, machine: Machine) -> str:
    status = {"failed": "**FAILED**"}.get(result.status, result.status)
    seconds = f"{result.seconds:.0f}" if result.seconds else ""
    said = "; ".join(filter(None, [result.part.shows, result.reason])).replace("|", "\\|").replace("\n", " ")
    return f"| {result.part.name} | {result.part.ranks} | {status} | {seconds} | {_in_words(_ratio(result, machine))} | " + (
        f"{_in_words(result.memory_ratio)} | {said} |"
    )


def _in_words(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
