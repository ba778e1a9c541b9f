"""How long a search takes, and how that grows with devices, batch and what may be chosen.

    python -m benchmarks.search_speed -o benchmarks/results

    devices      16 ... 16,384, a batch of as many sequences, gpt-175b on A100 nodes        demanded: 256 in 5 s on one core
    batch        256 ... 4,096 sequences on 256 devices: more micro-batch sizes
    choice       stock policies alone; without offloading; the best one alone
    model        fused attention, so that context parallelism is a choice, too; 32k tokens

Seconds of this process on its processor, for machines that are shared, and by the clock. One core, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from benchmarks import one_core
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import bundled_configs, cluster_data
from megatron_lynx.search import search
from megatron_lynx.search.best_first import STOCK, in_words
from megatron_lynx.yaml_file import read_yaml

DEMAND_S = 5.0
"""Seconds allowed for a search over all layouts of 256 devices for 175B, on one core."""


@dataclass(frozen=True)
class Row:
    """One search. `processor_s`, `clock_s`: medians."""

    what: str
    gpus: int
    batch: int
    considered: int
    processor_s: float
    clock_s: float
    best: str
    step_s: float
    mfu: float


def row(what: str, rounds: int, gpus: int, batch: int, model: str = "gpt-175b", **asked: Any) -> Row:
    """`asked`: what else the search is told, and `seq`."""
    job = _job(model, batch, asked.pop("seq", None))
    took, found = [], None
    for _ in range(rounds):
        began, began_s = time.process_time(), time.perf_counter()
        found = search(job, gpus, **asked)
        took.append((time.process_time() - began, time.perf_counter() - began_s))
    assert found is not None, "at least one round"
    best = found.candidates[0]
    processor_s, clock_s = (statistics.median(each) for each in zip(*took, strict=True))
    return Row(what, gpus, batch, found.considered, processor_s, clock_s, in_words(best.job), best.step_s, best.as_json["mfu"])


def rows(rounds: int) -> Iterator[Row]:
    for gpus in (64, 256, 1024, 4096, 16384):
        yield row("devices", rounds, gpus, batch=gpus)
    for batch in (1024, 4096):
        yield row("batch", rounds, 256, batch)
    yield row("stock policies alone", rounds, 256, 256, policies=STOCK)
    yield row("no offloading", rounds, 256, 256, offload=False)
    yield row("the best one alone", rounds, 256, 256, top=1)
    yield row("fused attention", rounds, 256, 256, model="llama-175b")
    yield row("32k tokens", rounds, 256, 256, model="llama2-70b", seq=32768)


def _job(model: str, batch: int, seq: int | None) -> Job:
    """Its layout and devices are what is looked for."""
    shape = read_yaml(bundled_configs() / "models" / f"{model}.yaml") | ({} if seq is None else {"seq": seq})
    cluster = cluster_data(bundled_configs() / "clusters" / "a100-80g.yaml")
    return Job.model_validate({"model": shape, "cluster": cluster, "gpus": 1, "batch": {"micro": 1, "global": batch}})


def markdown(found: Sequence[Row], machine: str) -> str:
    lines = [f"# Seconds of searching, {date.today()}", "", machine, ""]
    lines += ["| what | devices | batch | candidates | processor s | clock s | best | step s | MFU |"]
    lines += ["|---|--:|--:|--:|--:|--:|---|--:|--:|"]
    for each in found:
        size = f"| {each.what} | {each.gpus} | {each.batch} | {each.considered} | {each.processor_s:.2f} | {each.clock_s:.2f} "
        lines.append(f"{size}| {each.best} | {each.step_s:.2f} | {each.mfu:.1%} |")
    demanded = next(each for each in found if (each.what, each.gpus) == ("devices", 256))
    verdict = "met" if demanded.processor_s <= DEMAND_S else "MISSED"
    return "\n".join([*lines, "", f"256 devices in {DEMAND_S:g} s: {demanded.processor_s:.2f} s, {verdict}.", ""])


def main() -> None:
    one_core.run("search-speed", __doc__, 3, rows, _line, markdown)


def _line(row: Row) -> str:
    return f"{row.what:22} {row.gpus:6} devices  {row.processor_s:6.2f} s  {row.considered} candidates"


if __name__ == "__main__":
    main()
