"""The results as one page: JSON for programs, Markdown to paste into an issue."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from scripts.gpu_check.machine import Machine
from scripts.gpu_check.part import Result

DRY = "DRY RUN ON CPU RANKS, tiny sizes: this shows that the script runs. It is no measurement of a GPU."


def failed(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.status == "failed"]


def write_page(machine: Machine, results: Sequence[Result], folder: Path) -> str:
    """`results.json` and `results.md` in `folder`; the latter's text."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = as_json(machine, results)
    (folder / "results.json").write_text(json.dumps(facts, indent=2) + "\n")
    text = markdown(machine, results)
    (folder / "results.md").write_text(text)
    return text


def as_json(machine: Machine, results: Sequence[Result]) -> dict[str, Any]:
    return {
        "note": DRY if machine.dry else "",
        "passed": not failed(results),
        "gpus": list(machine.devices[: machine.gpus]),
        "ranks": machine.gpus,
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
                "step_ratio_to_stock": result.ratio,
                "memory_ratio_to_stock": result.memory_ratio,
                "figures": [dict(answer.figures) for answer in result.answers],
            }
            for result in results
        ],
    }


def markdown(machine: Machine, results: Sequence[Result]) -> str:
    counts = Counter(result.status for result in results)
    verdict = f"**{'FAILED' if failed(results) else 'PASSED'}**: " + ", ".join(
        f"{counts[status]} {status}" for status in ("passed", "failed", "skipped")
    )
    where = DRY if machine.dry else f"{machine.gpus} x {machine.devices[0]}, NCCL {machine.nccl}."
    lines = [f"# megatron-lynx acceptance run, {date.today()}", "", where, "", verdict, ""]
    lines += [f"* {name}: {value}" for name, value in machine.facts.items()]
    lines += ["", "| part | ranks | | seconds | step / stock | memory / stock | |", "|---|---|---|---|---|---|---|"]
    lines += [_row(result) for result in results]
    lines += [
        "",
        "Step and memory are ours by stock's without recomputation. So small, replays cost more than at real sizes.",
    ]
    return "\n".join(lines) + "\n"


def _row(result: Result) -> str:
    status = {"failed": "**FAILED**"}.get(result.status, result.status)
    seconds = f"{result.seconds:.0f}" if result.seconds else ""
    said = "; ".join(filter(None, [result.part.shows, result.reason])).replace("|", "\\|").replace("\n", " ")
    return f"| {result.part.name} | {result.part.ranks} | {status} | {seconds} | {_in_words(result.ratio)} | " + (
        f"{_in_words(result.memory_ratio)} | {said} |"
    )


def _in_words(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
