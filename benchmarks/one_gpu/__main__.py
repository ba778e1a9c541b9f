"""`python -m benchmarks.one_gpu`: measures the subjects that are asked for, one after the other, within a time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.one_gpu.page import page, subject_lines
from benchmarks.one_gpu.results import Results
from benchmarks.one_gpu.running import as_json, run_subject
from benchmarks.one_gpu.settings import Setting, settings_of
from benchmarks.one_gpu.subjects import subjects
from benchmarks.results_folder import add_out
from megatron_lynx.errors import LynxError
from megatron_lynx.profiler.profile import load_profile
from megatron_lynx.whole_file import write_whole
from tests import instruments

PAGE = "one-gpu.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every subject that was asked for has a row for stock none; else 1."""
    given = _read(arguments)
    if given.dry_run:
        instruments.offer()
    if given.read:
        print(page([*_read_again(Path(given.read), given)]))
        return 0
    folder = given.out
    until_s, found = time.time() + given.limit_s, list[Results]()
    for name in given.subjects:
        found.append(_run(name, given, folder, until_s, fusions=given.fusions == "all"))
        if not given.dry_run and given.fusions == "all" and found[-1].none is None:
            found.append(_run(name, given, folder, until_s, fusions=False, earlier=found.pop()))
        write_whole(folder / PAGE, page(found) + "\n")
        print("\n".join(subject_lines(found[-1])), flush=True)
    print(f"written to {folder}")
    return 0 if all(results.none for results in found) else 1


def _run(
    name: str, given: argparse.Namespace, folder: Path, until_s: float, *, fusions: bool, earlier: Results | None = None
) -> Results:
    """One subject. `earlier`: where not even stock none ran with fusions, it runs once more without, and says so."""
    subject = next(each for each in subjects(dry=given.dry_run, fusions=fusions) if each.name == name)
    print(f"{name}: {subject.shows}{'' if earlier is None else '; once more, without fusions'}", flush=True)
    try:
        results = run_subject(subject, folder, until_s, given.steps, dry=given.dry_run, only=given.only or ())
    except (LynxError, OSError) as error:
        print(f"  {name}: {error}", file=sys.stderr, flush=True)
        results = Results(name, subject.shows, not_run={"everything": " ".join(str(error).split())})
    for row in [] if earlier is None else earlier.rows[:1]:
        results.not_run["with Megatron's fusions"] = " ".join(str(row.get("error")).split())
    results.write(folder)
    return results


def _read_again(folder: Path, given: argparse.Namespace) -> Iterator[Results]:
    """Results that are there; of subjects of which there is a measured profile, what that predicts."""
    for file in sorted(folder.glob("one-gpu-*.json")):
        results = Results.read(folder, file.stem.removeprefix("one-gpu-"))
        profile = None if given.profiles is None else Path(given.profiles, f"profile-{results.subject}.yaml")
        subject = next(each for each in subjects(dry=given.dry_run) if each.name == results.subject)
        settings = list[Setting]()
        if profile is not None and profile.exists():
            settings, _ = settings_of(subject, load_profile(profile))
            results.shows += "; predicted from a layer measured here"
        elif given.again:
            settings = [each for each in settings_of(subject)[0] if "planned" not in each.name]
            results.shows += "; predicted again with today's prices, plans of the planner excepted: today's are others"
        results.predicted |= {each.name: as_json(each) for each in settings}
        yield results


def _read(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [subject.name for subject in subjects(dry=True)]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_gpu", description=__doc__)
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"some of {', '.join(names)}; llama if none")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU rank; measures nothing")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds for all of it; by default %(default)g")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each setting")
    parser.add_argument("--only", nargs="*", metavar="TEXT", help="settings with one of these in their names, and stock none")
    parser.add_argument("--fusions", choices=["all", "none"], default="all", help="Megatron's, which torch.compile compiles")
    add_out(parser, "build/one-gpu")
    parser.add_argument("--read", metavar="FOLDER", help="print the page of results that are there, and measure nothing")
    parser.add_argument("--again", action="store_true", help="with --read: predict with the prices of today")
    parser.add_argument("--profiles", metavar="FOLDER", help="with --read: of benchmarks.gpu_figures; predict from these")
    given = parser.parse_args(arguments)
    given.subjects = given.subjects or names[:1]
    if unknown := [name for name in given.subjects if name not in names]:
        parser.error(f"found {', '.join(unknown)}, needed some of {', '.join(names)}")
    return given


if __name__ == "__main__":
    sys.exit(main())
