"""Everything this package raises on purpose.

    LynxError
     ├── ConfigError      a file, a key or a flag is wrong                      exit status 2
     ├── PlanMismatch     the plan does not fit the run it was given to         exit status 2
     ├── Infeasible       the question was right and its answer is no           exit status 1
     ├── PlannerFault     a finished plan breaks what it was asked to keep      exit status 1
     ├── HookRefused      Megatron is not as this package knows it (rule R6)    exit status 1
     ├── ReplayError      a training step asked for what replay cannot give     (raised inside the job)
     └── OffloadError     activations could not be brought to the host or back  (raised inside the job)

Every error carries *all* its problems, and each problem says where, what was found, what is needed and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `where` is a place a person can go to: `plan.yaml: stages.0.layers`, `--tensor`.

    `needed` is empty where `found` is a whole sentence that says both.
    """

    where: str
    found: str
    needed: str
    todo: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: found {self.found}, needed {self.needed}" if self.needed else f"{self.where}: {self.found}"
        return f"{text}; {self.todo}" if self.todo else text


def in_words(error: OSError) -> str:
    """What was found where a file was wanted: `a folder`, `no such file`, `permission denied`."""
    words = {
        FileNotFoundError: "no such file",
        IsADirectoryError: "a folder",
        NotADirectoryError: "a file where a folder is needed",
        FileExistsError: "a file where a folder is needed",
    }
    return words.get(type(error)) or str(error.strerror or error).lower()


class LynxError(Exception):
    """Base of all of them. `problems` is never empty; `exit_status` is what a command ends with."""

    exit_status = 1

    def __init__(self, headline: str, problems: Sequence[Problem]) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__(headline, self.problems)

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"  - {problem}" for problem in self.problems)])


class ConfigError(LynxError):
    """A file, a key or a flag is wrong."""

    exit_status = 2


class PlanMismatch(LynxError):
    """The plan is sound, but it was made for another model, layout or launch than this one."""

    exit_status = 2


class Infeasible(LynxError):
    """No answer exists; the problems name what binds and by how much."""


class PlannerFault(LynxError):
    """The planner's own mistake: its finished plan does not keep the budget. To be reported; nobody else can mend it."""


class HookRefused(LynxError):
    """Megatron, or what it was told to do, is not what this package can hold on to (rules R6 and R14)."""


class ReplayError(LynxError):
    """Training asked for something that a replayed activation cannot give (a second backward, for example)."""


class OffloadError(LynxError):
    """Activations could not be copied to the host or back, or the host has no room for them."""
