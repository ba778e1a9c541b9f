"""Types of gradients and optimizer state. The weights' type is the model's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_lynx.validation import Part

ADAMS = 2
"""States of Adam: two moments."""

Moment = Literal["fp32", "bf16", "fp16", "fp8"]


class Optimizer(Part):
    """The optimizer and its state per parameter. `cost.parameters` computes the bytes."""

    gradients: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients are accumulated and reduced. bf16: the weights' own type, bf16 or fp16."""
    states: int = Field(default=ADAMS, ge=0, le=8)
    """Optimizer states per parameter, besides the main parameter: two for Adam, one for SGD with momentum and Lion, three for
    AdEMAMix."""
    muon_steps: int = Field(default=0, ge=0, le=100)
    """Newton-Schulz steps of Muon for the weights of layers (`cost.muon`); 0: no Muon."""
    matrix_states: int = Field(default=1, ge=0, le=8)
    """States per weight that Muon updates: momentum, and a second moment with `adaptive_muon`."""
    precision_aware: bool = False
    """Whether Transformer Engine's Adam reads gradients in their type, and stores main parameters and moments itself."""
    main_parameters: Literal["fp32", "remainder", "fp16"] = "fp32"
    """Type of main parameters. remainder: the low half of fp32 that bf16 weights lack, as in a precision-aware optimizer."""
    first_moment: Moment = "fp32"
    second_moment: Moment = "fp32"
    offload: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of a rank's parameters that is updated on the host. auto: the fastest share; 0 until the planner chooses."""
    overlap_copies: bool = False
    """Whether gradient copies to the host overlap its updates."""
    states_on_host: float = Field(default=0.0, ge=0, le=1)
    """Share of main parameters and moments in host memory between updates, which run on the device
    (`--chunked-optimizer-state-offload`)."""
    chunk_mib: int = Field(default=0, ge=0)
    """MiB of moments restored per chunk, two of which are on the device; 0: all at once."""

    @model_validator(mode="after")
    def _sensible(self) -> Optimizer:
        smaller = {
            name: value
            for name in ("main_parameters", "first_moment", "second_moment")
            if (value := getattr(self, name)) != "fp32"
        }
        if smaller and not self.precision_aware:
            found = ", ".join(f"{name} {value}" for name, value in smaller.items())
            raise ValueError(f"{found} needs precision_aware: true (--use-precision-aware-optimizer), found false")
        if self.precision_aware and self.muon_steps:
            raise ValueError(
                f"precision_aware: true needs muon_steps 0, found {self.muon_steps}: it is Transformer Engine's Adam"
            )
        if self.precision_aware and self.states != ADAMS:
            raise ValueError(f"precision_aware: true needs states {ADAMS}, found {self.states}: it is Transformer Engine's Adam")
        if self.states_on_host and self.offload != 0:
            found = f"states_on_host {self.states_on_host:g} and offload {self.offload}"
            raise ValueError(f"{found}: one of them, as Megatron refuses both")
        if self.offload != 0 and not self.precision_aware:
            found = f"offload {self.offload} needs precision_aware: true (--use-precision-aware-optimizer)"
            raise ValueError(f"{found}, found false, as Megatron refuses it")
        return self

    @property
    def offloaded(self) -> float:
        """Share updated on the host; 0 if undecided."""
        return 0.0 if self.offload == "auto" else self.offload

    @property
    def on_host(self) -> bool:
        """Whether optimizer state is in host memory."""
        return bool(self.offloaded or self.states_on_host)
