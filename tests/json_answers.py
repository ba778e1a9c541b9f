"""The keys that `--json` prints, by command. The version rises when a key is removed, or changes its meaning."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Rows = list[dict[str, Any]]


class Answer(BaseModel):
    """Seconds, bytes and tokens are in these units; null is unknown."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    version: Literal[1]


class Estimate(Answer):
    """`estimate --json`: memory of each device and seconds of a step."""

    fits: bool
    offload_ratio: float
    budget_bytes: int
    device: dict[str, Any]
    """Capacity and reserved bytes of the device."""
    stages: Rows
    """`memory_bytes` by part at the peak `moment`."""
    step_s: float | None
    """Including the optimizer's update."""
    step_parts_s: dict[str, float] | None
    tokens_per_s: float | None
    mfu: float | None
    host_time: dict[str, Any] | None
    launch: dict[str, Any] | None = None
    """For a launch: `step_s`, `memory_bytes`, `setting`, `flags`."""
    understood: dict[str, Any] | None = None
    """For a launch: `facts`, each with its flag."""


class Search(Answer):
    """`search --json`: the fastest layouts."""

    gpus: int
    budget_bytes: int
    """For the job's own layout; each candidate has its own."""
    candidates: Rows
    considered: int
    seconds: float


class Step(BaseModel):
    """A whole step, including the optimizer's update, and the bytes of the fullest device."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    step_s: float | None
    """The longest of a range; null if it cannot be priced, or does not fit."""
    step_at_best_s: float | None = None
    """The shortest of a range; missing if the step is one figure."""
    memory_bytes: int | None = None


class OfLaunch(Step):
    """The launch as it is written."""

    setting: str
    flags: list[str]
    """Dropped under a plan."""
    not_priced: str | None = None
    """Why it has no figures."""


class Change(BaseModel):
    """Flags that the launch loses and gets."""

    delete: list[str]
    add: list[str]


class OfStock(Step):
    """Stock Megatron's best setting that fits."""

    setting: str
    flags: list[str]
    """All flags of the setting."""
    change: Change
    step_most_s: float
    """As `step_s`."""


class OfPlan(Step):
    """The recommended plan."""

    flags: list[str]
    """Added to the launch."""
    change: Change
    offload_ratio: float | Literal["auto"]
    file: str | None = None
    """Written by `plan`."""


class OfNeighbour(Step):
    """A layout one step away, with the figures of the faster of `stock` and `plan`."""

    flags: str
    """`layout` in words."""
    layout: Change
    """Under the plan."""
    stock_layout: Change
    """With stock, which places layers evenly."""
    launch: str | None
    """The launch line under its plan."""
    stock: OfStock | None
    plan: OfPlan | None


class Verdict(Step):
    """What to run."""

    text: str
    run: Literal["launch", "stock", "plan", "neighbour"] | None
    """null if nothing fits."""


class Advice(Answer):
    """`advise --json`: the launch today, stock's best, the plan, and both in layouts one step away."""

    launch: OfLaunch
    stock: OfStock | None
    """null if no setting fits."""
    plan: OfPlan | None
    """null without a plan: `no_plan` says why."""
    plan_without_copies: Step | None = None
    """If `plan` offloads activations, and a plan without offloading fits."""
    plan_in_todays_bytes: Step | None = None
    """Within the launch's bytes."""
    neighbours: list[OfNeighbour] | None = None
    budget_bytes: int
    verdict: Verdict
    no_plan: list[str] | None = None
    would_fit: list[str] | None = None
    understood: dict[str, Any] | None = None
    step_s: float | None = None
    """The longest of the plan, including the optimizer's update."""
    update_s: float | None = None
    """The optimizer's update, a part of `step_s`."""
    memory_bytes: int | None = None
    """The fullest device under the plan."""
    stages: Rows | None = None
    partition: list[int] | None = None
    launch_flags: list[str] | None = None
    launch_environment: dict[str, str] | None = None
    weight_gradients: str | None = None
    host_time: dict[str, Any] | None = None


class Planned(Advice):
    """`plan --json`: as `advise`, without layouts one step away."""


class Simulation(Answer):
    """`simulate --json`: one step."""

    step_s: float | None
    """Including the optimizer's update; null if that is unknown."""
    passes_s: float
    """Forwards and backwards over all stages."""
    update_s: float | None = None
    memory_bytes: int | None = None
    """The fullest device."""
    stages: Rows
    """Seconds by purpose, `peak_activation_bytes`, and the begin and end of every action."""


class RowsOfSettings(Answer):
    """`compare --json` and `validate --json`: a row for each setting, published figure or step."""

    rows: Rows


class Validation(RowsOfSettings):
    """`validate --json`. The other keys are of `--leave-one-out`, whose rows are steps."""

    totals: dict[str, dict[str, float | None]] | None = None
    """By family and grade: means of the series' leave-one-out errors, in percent."""
    byte_error_percent: float | None = None
    ratio_error_percent: dict[str, float] | None = None
    wrong_order: list[list[str]] | None = None
    """Pairs of settings."""
    constants: dict[str, dict[str, float]] | None = None
    """By generation: factors of the free constants that fit all series."""


class Findings(Answer):
    """`doctor --json`."""

    findings: list[dict[str, str]]
    """`level` is good, note, slows or defeats; `found`, `costs`, `todo` are sentences."""


class Hooks(Answer):
    """`hooks --json`."""

    megatron_core: str
    hooks: Rows


ANSWERS: dict[str, type[Answer]] = {
    "advise": Advice,
    "compare": RowsOfSettings,
    "doctor": Findings,
    "estimate": Estimate,
    "hooks": Hooks,
    "plan": Planned,
    "search": Search,
    "simulate": Simulation,
    "validate": Validation,
}
"""By command. `explain` prints a plan (configs/plan.schema.json), `profile` the written profile."""
