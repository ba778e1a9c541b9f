"""Seconds of a step: one figure, or a range where an overlap hides an unknown part of what it could."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.profiler.profile import Profile
from megatron_lynx.units import format_seconds


@dataclass(frozen=True)
class StepRange:
    """From the shortest to the longest step that is possible; both are equal where the step is known."""

    least_s: float
    most_s: float

    @classmethod
    def known(cls, seconds: float) -> StepRange:
        return cls(seconds, seconds)

    @property
    def expected_s(self) -> float:
        """The middle, by which steps are ranked."""
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
        """`step_s`: the longest, which every command prints of a step; the shortest where there is another one."""
        return {"step_s": self.most_s, **({} if self.is_known else {"step_at_best_s": self.least_s})}

    def plus(self, seconds: float) -> StepRange:
        return StepRange(self.least_s + seconds, self.most_s + seconds)


def hiding_all(profile: Profile) -> Profile:
    """The profile as if userbuffers hid every exchange behind its GEMM, as far as that lasts."""
    return profile.model_copy(update={"hiding": "userbuffers"})
