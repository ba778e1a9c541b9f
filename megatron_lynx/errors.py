"""The exceptions that this package raises deliberately.

    LynxError
     ├── ConfigError      a file, a key or a flag is wrong                      exit status 2
     ├── PlanMismatch     the plan was made for another model, layout or launch exit status 2
     ├── Infeasible       the question was right and its answer is no           exit status 1
     ├── PlannerFault     a finished plan breaks its own budget: to be reported exit status 1
     ├── HookRefused      this Megatron is not supported (rule R6)              exit status 1
     ├── RecomputeError   a training step needs what recomputation cannot give  (raised inside the job)
     └── OffloadError     the host has too little memory for activations      (raised inside the job)

Every error carries *all* its problems, each with its place, the finding, the need and a remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Problem:
    """One problem. `where` is a place that a user can find: `plan.yaml: stages.0.layers`, `--tensor`.

    `needed` is empty if `finding` is a whole sentence that says both.
    """

    where: str
    finding: str
    needed: str
    todo: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: found {self.finding}, needed {self.needed}" if self.needed else f"{self.where}: {self.finding}"
        return f"{text}; {self.todo}" if self.todo else text


def suggestion(name: str, known: Iterable[str]) -> str:
    """`did you mean tensor?` for the known name most like a misspelt one; empty if none is like it."""
    close = closest(name, known)
    return "" if close is None else f"did you mean {close}?"


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like a misspelt one; None if none is like it."""
    return next(iter(get_close_matches(name, list(known), n=1)), None)


def in_words(error: OSError) -> str:
    """An OSError in words: `a folder`, `no such file`, `permission denied`."""
    words = {
        FileNotFoundError: "no such file",
        IsADirectoryError: "a folder",
        NotADirectoryError: "a file where a folder is needed",
        FileExistsError: "a file where a folder is needed",
    }
    return words.get(type(error)) or str(error.strerror or error).lower()


class LynxError(Exception):
    """Base class. `problems` is never empty; `exit_status` is a command's."""

    exit_status = 1

    def __init__(self, headline: str, problems: Sequence[Problem]) -> None:
        self.headline = headline
        self.problems = tuple(problems)
        super().__init__(headline, self.problems)

    def __str__(self) -> str:
        return "\n".join([self.headline, *(f"  - {problem}" for problem in self.problems)])


class ConfigError(LynxError):
    exit_status = 2


class PlanMismatch(LynxError):
    exit_status = 2


class Infeasible(LynxError):
    """The problems name the binding limits, and by how much they are exceeded."""


class PlannerFault(LynxError): ...


class HookRefused(LynxError): ...


class RecomputeError(LynxError): ...


class OffloadError(LynxError): ...
