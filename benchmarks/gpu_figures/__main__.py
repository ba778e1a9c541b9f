"""`python -m benchmarks.gpu_figures`: measures the parts that are asked for, one after the other, within a time."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_figures.figure import Figure, Part, page
from benchmarks.gpu_figures.profiles import measured_profile, profile_figures
from benchmarks.gpu_figures.rates import rates
from benchmarks.one_gpu.subjects import Subject, subjects
from benchmarks.results_folder import add_out
from megatron_lynx.config.job import Job
from megatron_lynx.errors import LynxError
from megatron_lynx.measure.measurement import Links, this_machine
from megatron_lynx.profiler.profile import save_profile
from megatron_lynx.testbed.ranks import RankError, run_ranks
from megatron_lynx.whole_file import write_whole

RATES = "rates"
PROFILED = ("llama", "gpt", "small")
"""Subjects of `benchmarks.one_gpu` of which a layer is measured."""


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every part that was asked for has figures, else 1."""
    given = _read(arguments)
    folder = given.out
    known = {subject.name: subject for subject in subjects(dry=given.dry_run, fusions=given.fusions == "all")}
    until_s, parts = time.time() + given.limit_s, list[Part]()
    facts = {"machine": str(this_machine(Links(kind="none"), "cpu" if given.dry_run else "cuda"))}
    for name in given.parts or [RATES, *PROFILED]:
        part, begin_s = Part(name), time.time()
        try:
            if begin_s > until_s:
                raise TimeoutError("time was over")
            part.figures, part.notes = _measured(name, known, folder, until_s - begin_s, dry=given.dry_run)
        except (LynxError, RankError, TimeoutError, OSError) as error:
            part.error = "\n".join(str(error).strip().splitlines()[-8:])
        part.seconds = time.time() - begin_s
        parts.append(part)
        write_whole(folder / "gpu-figures.json", json.dumps([each.as_json for each in parts], indent=1) + "\n")
        write_whole(folder / "gpu-figures.md", page(parts, facts) + "\n")
    print(page(parts, facts))
    return 0 if all(part.figures for part in parts) else 1


def _measured(name: str, known: dict[str, Subject], folder: Path, limit_s: float, *, dry: bool) -> tuple[list[Figure], list[str]]:
    """Figures, and notes on them."""
    if name == RATES:
        env = {"CUDA_VISIBLE_DEVICES": ""} if dry else {}
        job: Job = known["llama"].job
        figures, notes = run_ranks(rates, 1, job, dry, pin=False, env=env, timeout_s=limit_s)[0]
        return figures, notes
    profile = measured_profile(known[name].job, limit_s, dry=dry)
    file = folder / f"profile-{name}.yaml"
    save_profile(profile, file)
    shares = "" if profile.source.stood_in_for is None else f"; a stand-in for {profile.source.stood_in_for}"
    return [*profile_figures(known[name].job, profile)], [f"{known[name].shows}: one layer{shares}; {file.name} is the profile"]


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [RATES, *PROFILED]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_figures", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(names)}; all if none")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU rank; measures nothing")
    parser.add_argument("--limit-s", type=float, default=240.0, help="seconds for all of it; by default %(default)g")
    parser.add_argument("--fusions", choices=["all", "none"], default="all", help="Megatron's, which torch.compile compiles")
    add_out(parser, "build/gpu-figures")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.parts if name not in names]:
        parser.error(f"found {', '.join(unknown)}, needed some of {', '.join(names)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
