"""What a plan's seconds come to for what came: fewer micro-batches, shorter ones, shorter sequences in them.

passes   x  (m + f) / (M + f)  x  [(1 - a) t + a q]          m, M   micro-batches that came, that were planned
replays  x   m / M             x  [(1 - a) t + a q]          f      the filling of the pipeline, in micro-batches
                                                            t      tokens of one, over a full one's
                                                            q      squares of its lengths, over those planned
                                                            a      core attention's share of the passes; 0 where unknown
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_lynx.measure.run_outcome import StepMet
from megatron_lynx.plan import Plan
from megatron_lynx.runtime.met import Met


def step_met(plan: Plan, met: Met, steps: int, shards: int) -> StepMet | None:
    """What one rank met in so many steps; waits for the device where lengths were on it. None: it has no attention half that
    tells. `shards`: ranks among which a sequence is cut."""
    if not met.microbatches or not steps:
        return None
    full, packed = plan.model.seq * plan.batch.micro, plan.batch.packed
    microbatches, planned = met.microbatches / steps, plan.batch.microbatches
    tokens = met.tokens * shards / (met.microbatches * full)
    per_token = plan.model.seq if packed is None else packed.squares_per_token
    squares = float(met.squares) / (met.microbatches * full * per_token)
    core = 0.0 if packed is None else packed.core_share
    of_full = (1 - core) * tokens + core * squares
    return StepMet(
        microbatches=microbatches,
        planned_microbatches=planned,
        tokens=tokens,
        squares=squares,
        by_squares=packed is not None,
        passes=of_full * plan.passes(microbatches) / plan.passes(planned),
        replays=of_full * microbatches / planned,
    )


def most(found: Iterable[StepMet | None]) -> StepMet | None:
    """Of ranks the one with most to do, for which the others wait. None: it had what was planned, or nobody knows."""
    fullest = max((met for met in found if met is not None), key=lambda met: met.passes, default=None)
    return None if fullest is None or fullest.as_planned else fullest
