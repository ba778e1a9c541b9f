"""`python -m tests.fuzz`: trains drawn jobs under drawn and planned plans against stock, and compares every bit.

python -m tests.fuzz                        seeds from the clock, for five minutes (`make fuzz`)
python -m tests.fuzz --seed 17              this case alone
python -m tests.fuzz --seed 17 --cases 100  a hundred, from this one on
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import tests.conftest  # noqa: F401 (before torch is imported: ranks as tests have them)
from megatron_lynx.plan import save_plan
from megatron_lynx.testbed.ranks import RankPool
from tests.fuzz.cases import KINDS, RELEASES, Case, case_of
from tests.fuzz.running import Ranks, problems_of
from tests.nursery.process import start_rank

FOLDER = Path("build/fuzz")
"""Of plans that failed, and of all that was said of each."""

LAST = 400
"""Characters on the screen of what was said of one, from its end."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Trains drawn jobs under plans against stock.")
    parser.add_argument("--seed", type=int, help="of the first case; without it, the present second")
    parser.add_argument("--cases", type=int, help="how many; without it, one of a given seed, else until time is up")
    parser.add_argument("--minutes", type=float, default=5.0, help="after which no case begins, where their number is not given")
    parser.add_argument("--release", action="append", choices=RELEASES, help="of megatron-core; all of them without it")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of layers; all of them without it")
    given = parser.parse_args()
    RankPool.process = start_rank  # type: ignore[method-assign, assignment]
    ranks, tried, failed = Ranks(), 0, dict[int, None]()
    for case in _cases(given):
        print(case, flush=True)
        tried += 1
        for number, (source, plan, what) in enumerate(problems_of(case, ranks.of(case))):
            failed[case.seed] = None
            FOLDER.mkdir(parents=True, exist_ok=True)
            save_plan(plan, path := FOLDER / f"{case.seed}-{number}.yaml")
            path.with_suffix(".txt").write_text(what)
            print(f"    FAILED, {source}: {path}, .txt\n    ... {what[-LAST:]}", flush=True)
    ranks.close()
    print(f"{tried} cases; seeds of those that failed: {', '.join(map(str, failed)) or 'none'}")
    return 1 if failed else 0


def _cases(given: argparse.Namespace) -> Iterator[Case]:
    releases, kinds = tuple(given.release or RELEASES), tuple(given.kind or KINDS)
    first = int(time.time()) if given.seed is None else given.seed
    most = given.cases or (sys.maxsize if given.seed is None else 1)
    ends = time.monotonic() + 60 * given.minutes
    for seed in range(first, first + most):
        if most == sys.maxsize and time.monotonic() > ends:
            return
        yield case_of(seed, releases, kinds)


if __name__ == "__main__":
    sys.exit(main())
