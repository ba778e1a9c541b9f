"""What plans do at exactly the bytes of stock's full recomputation: a row for each job, or for each launch of a folder.

python -m benchmarks.never_less                              bundled jobs, and Llama 3: docs/generated/never_less.md
python -m benchmarks.never_less --launches FOLDER            launches that recompute today, each at its own bytes
                                --offloading                 plans may offload, where stock does not

Simulated, without the optimizer's update. Where no plan fits them, a job with experts gets what its routers keep beside them:
they decide once, where stock's full recomputation has them decide again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks.when_not import job_of, on_devices_of
from megatron_lynx.advise.today import asked_launch
from megatron_lynx.config.job import Job
from megatron_lynx.config.loader import job_path, load_job
from megatron_lynx.cost.recompute import Checkpoint
from megatron_lynx.cost.section import priced as priced_section
from megatron_lynx.cost.stage import chunks_in_flight
from megatron_lynx.errors import Infeasible, LynxError
from megatron_lynx.launch_arguments.command_line import read_launch_file
from megatron_lynx.planner import Decision, decide
from megatron_lynx.profiler.analytic import analytic_profile
from megatron_lynx.profiler.profile import Profile
from megatron_lynx.stock import FULL, NONE, StockSetting, priced
from megatron_lynx.units import GIB

JOBS = (
    "llama3-8b-a100-80g",
    "llama3-8b-h800-80g",
    "llama3-70b-a100-80g",
    "llama3-70b-h800-80g",
    "llama3-70b-256k-h100-80g",
    "llama-7b-a100-80g",
    "gpt-22b-a100-80g",
    "qwen3-30b-a3b-h100-80g",
    "mixtral-8x7b-h100-80g",
    "deepseek-v2-lite-h100-80g",
    "deepseek-v3-h100-80g",
)
LAYOUTS = (
    ("llama3-8b", 4, 2, 16),
    ("llama3-70b", 8, 4, 32),
    ("llama3-8b", 1, 2, 16),
    ("llama3-70b", 1, 20, 80),
)
"""Models, tensor-parallel ranks, stages and micro-batches of one replica, with tensor parallelism and without."""
CLUSTERS = ("a100-80g", "h100-80g", "h800-80g")


def kept_by_routers(job: Job, profile: Profile) -> int:
    """Bytes on the device where it is most, if every layer with experts is checkpointed."""
    if job.model.experts is None:
        return 0
    section, fed = job.model.kind_sections(experts=True)[-1], Checkpoint(fed=True)
    each = priced_section(profile, section, fed.items(section), fed).memory.resident
    stages = range(job.parallel.pipeline)
    return each * max(chunks_in_flight(job, stage) * max(job.chunk_layers(stage)) for stage in stages)


def row(name: str, job: Job, setting: StockSetting, *, offloads: bool) -> tuple[str, float | None]:
    """A line of Markdown, and the plan's step over stock's, which offloads nothing."""
    profile = analytic_profile(job)
    none, today = priced(job, profile, NONE), priced(job, profile, setting)
    begin = f"| {name} | {setting.name} | {today.most_bytes / GIB:.2f} | {today.step_s / none.step_s:.2f} |"
    try:
        asked_for = job.model_copy(update={"offload_ratio": "auto" if offloads else 0.0})
        decision, beside = decided(asked_for, profile, today.most_bytes)
    except LynxError as error:
        return f"{begin} none: {error.headline} | | |", None
    rules = [rule for stage in decision.plan.stages for rule in stage.rules if rule.checkpoint]
    layers, ours_s = sum(len(rule.layers) for rule in rules), decision.simulation.step_s
    ratio = ours_s / today.step_s
    beside_gib = f" at + {beside / GIB:.2f} GiB" if beside else ""
    return f"{begin[:-2]} | {ours_s / none.step_s:.2f}{beside_gib} | {layers} | {ratio:.2f} |", ratio


def decided(job: Job, profile: Profile, size_bytes: int) -> tuple[Decision, int]:
    """The decision at these bytes, or with what routers keep beside them; and how many bytes that is."""
    job = job.model_copy(update={"policy": "planned"})
    try:
        return decide(on_devices_of(job, size_bytes / GIB), profile), 0
    except Infeasible:
        if job.model.experts is None:
            raise
    beside = kept_by_routers(job, profile)
    return decide(on_devices_of(job, (size_bytes + beside) / GIB), profile), beside


def launched(path: Path) -> tuple[Job, StockSetting]:
    """A launch and what it recomputes today. Raises `ConfigError` where it cannot be read."""
    file = read_launch_file(path)
    asked = asked_launch(list(file.words), file.cluster or "h100-80g")
    return asked.job, asked.reading.today.setting


def asked(folder: Path | None) -> Iterator[tuple[str, tuple[Job, StockSetting] | LynxError]]:
    """Every job that has a row, with what it recomputes, by name; or why it cannot be read."""
    if folder is None:
        yield from ((name, (load_job(job_path(f"jobs/{name}")), FULL)) for name in JOBS)
        for model, tensor, pipeline, microbatches in LAYOUTS:
            for cluster in CLUSTERS:
                layout = {"tensor": tensor, "pipeline": pipeline, "microbatches": microbatches}
                job = job_of({"model": model, "cluster": cluster, **layout})
                yield f"{model}, t={tensor}, p={pipeline}, m={microbatches}, {cluster}", (job, FULL)
        return
    for path in sorted(folder.glob("*.args")):
        try:
            yield path.stem, launched(path)
        except LynxError as error:
            yield path.stem, error


def lines(folder: Path | None, *, offloads: bool) -> Iterator[str]:
    yield "| job | stock | GiB | stock's step / none's | ours / none's | layers checkpointed | ours / stock |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    ratios = []
    for name, found in asked(folder):
        if isinstance(found, LynxError):
            yield f"| {name} | not read: {found.headline} | | | | | |"
            continue
        job, setting = found
        if setting == NONE:
            continue
        line, ratio = row(name, job, setting, offloads=offloads)
        ratios += [] if ratio is None else [ratio]
        yield line
    yield f"\nMean of the last column: {statistics.mean(ratios):.2f}, at most {max(ratios):.2f}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=Path)
    parser.add_argument("--offloading", action="store_true")
    asked_for = parser.parse_args()
    for line in lines(asked_for.launches, offloads=asked_for.offloading):
        print(line, flush=True)


if __name__ == "__main__":
    main()
