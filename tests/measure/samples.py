"""A measurement made by hand: two ranks, three rounds; figures chosen so that every answer can be worked out on paper."""

from __future__ import annotations

from typing import Any

from megatron_lynx.measure.measurement import Links, Machine, Measurement, RankResult, Setting, Skipped

MIB = 1024**2
MACHINE = Machine(
    cpu="Example CPU",
    cores=2,
    python="3.11.9",
    torch="2.13.0",
    megatron_core="0.16.1",
    links=Links(kind="shaped", mbit_per_s=400),
)


def setting(name: str, step_s: float, resident_mib: int, peak_mib: int, ours: bool = False, **of_ranks: Any) -> Setting:
    """Rank 1 is slower by a tenth in the second round and holds half the bytes."""
    common = {"gradients_equal": True} | of_ranks
    return Setting(
        name=name,
        ours=ours,
        ranks=(
            RankResult(
                rank=0,
                step_s=(step_s, step_s, step_s * 2),
                resident_bytes=resident_mib * MIB,
                peak_bytes=peak_mib * MIB,
                **common,
            ),
            RankResult(
                rank=1,
                step_s=(step_s, step_s * 1.1, step_s),
                resident_bytes=resident_mib * MIB // 2,
                peak_bytes=peak_mib * MIB // 2,
                **common,
            ),
        ),
    )


def measurement(**changes: Any) -> Measurement:
    """Medians are 1.1 times `step_s`: the slowest rank's samples are step_s, 1.1 step_s and 2 step_s."""
    values: dict[str, Any] = {
        "subject": "tiny-gpt, TP 2, 2 micro-batches",
        "machine": MACHINE,
        "device": "cpu",
        "warmups": 1,
        "settings": (
            setting("stock none", 1.0, 100, 120, gradients_equal=None),
            setting("stock full", 1.4, 10, 40),
            setting("stock block-2", 1.2, 50, 60),
            setting("ours on demand", 1.25, 18, 70, ours=True, on_demand=16, on_demand_s=0.25),
            setting("ours in windows", 1.01, 18, 70, ours=True, in_windows=14, on_demand=2, on_demand_s=0.02),
        ),
        "skipped": (Skipped(name="stock mlp", reason="recurses without end in this release"),),
    }
    return Measurement(**values | changes)
