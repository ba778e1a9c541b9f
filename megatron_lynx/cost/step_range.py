"""Seconds of a step: one figure, or a range if the hidden part of an overlap is unknown."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.profiler.profile import Profile
from megatron_lynx.units import format_seconds


@dataclass(frozen=True)
class StepRange:
    """Shortest and longest possible step; equal if known."""

    least_s: float
    most_s: float

    @classmethod
    def known(cls, seconds: float) -> StepRange:
        return cls(seconds, seconds)

    @property
    def expected_s(self) -> float:
        """Middle of the range; steps are ranked by it."""
        return (self.least_s + self.most_s) / 2

    @property
    def is_known(self) -> bool:
        return self.least_s == self.most_s

    @property
    def in_words(self) -> str:
        (least, unit), most = format_seconds(self.least_s).split(), format_seconds(self.most_s)
        if f"{least} {unit}" == most:
            return most
        return f"{least.removesuffix('.0')} to {most}" if most.endswith(f" {unit}") else f"{least} {unit} to {most}"

    @property
    def as_json(self) -> dict[str, float]:
        """`step_s` is the longest, as in every command; `step_at_best_s` the shortest, if it differs."""
        return {"step_s": self.most_s, **({} if self.is_known else {"step_at_best_s": self.least_s})}

    def plus(self, seconds: float) -> StepRange:
        return StepRange(self.least_s + seconds, self.most_s + seconds)


def hiding_all(profile: Profile) -> Profile:
    """Return the profile as if userbuffers hid every exchange as far as its GEMM lasts."""
    return profile.model_copy(update={"hiding": "userbuffers"})
