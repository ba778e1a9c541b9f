"""The types in which gradients and the optimizer's state are held, beside the weights (their type is the model's)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_lynx.validation import Part

ADAMS = 2
"""States of Adam: its two moments."""

Moment = Literal["fp32", "bf16", "fp16", "fp8"]


class Optimizer(Part):
    """Adam, as Megatron holds it, or what remembers more or fewer numbers. `cost.parameters` says how many bytes follow."""

    gradients: Literal["fp32", "bf16"] = "fp32"
    """The type in which gradients are added up and reduced. bf16 stands for the weights' own type, be it bf16 or fp16."""
    states: int = Field(default=ADAMS, ge=0, le=8)
    """Numbers that are remembered of each parameter, beside what is stepped: two moments of Adam, one of SGD with momentum and of
    Lion, three of AdEMAMix."""
    muon_steps: int = Field(default=0, ge=0, le=100)
    """Newton-Schulz steps with which Muon updates the weights of layers (`cost.muon`); 0: it does not."""
    matrix_states: int = Field(default=1, ge=0, le=8)
    """Numbers that are remembered of each of these weights: momentum, and of `adaptive_muon` a second moment."""
    precision_aware: bool = False
    """Transformer Engine's Adam reads gradients as they are, and holds main parameters and moments itself."""
    main_parameters: Literal["fp32", "remainder", "fp16"] = "fp32"
    """What is stepped. remainder: of fp32 only the half that bf16 weights lack, as a precision-aware optimizer holds it."""
    first_moment: Moment = "fp32"
    second_moment: Moment = "fp32"
    offload: Literal["auto"] | Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of what a rank owns that is stepped on the host. auto: what makes a plan fastest; it is 0 until that is known."""
    overlap_copies: bool = False
    """Whether its gradients are copied to the host while others are stepped there."""
    states_on_host: float = Field(default=0.0, ge=0, le=1)
    """Share of main parameters and moments that is in host memory between updates, which run on the device
    (`--chunked-optimizer-state-offload`)."""
    chunk_mib: int = Field(default=0, ge=0)
    """Moments that an update restores in one chunk, of which two are on the device; 0: all at once."""

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
        """The share, 0 where it is still to be found."""
        return 0.0 if self.offload == "auto" else self.offload

    @property
    def on_host(self) -> bool:
        """Whether host memory holds any of it."""
        return bool(self.offloaded or self.states_on_host)
