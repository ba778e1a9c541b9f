"""1F1B without flushes, and the version of the weights of each micro-batch (PipeDream-2BW).

    p = 3, m = 3, three batches          nF0, nB0 forward and backward of micro-batch n, Uj the update of batch j

    stage 0   0F0 1F0 | 2F0 0B0  3F0 1B0  4F0 2B0 U0  5F0 3B0  6F0 4B0  7F0 5B0 U1  8F0 6B0 | 7B0 8B0 U2
    stage 1   0F0 | 1F0 0B0  2F0 1B0  3F0 2B0 U0  4F0 3B0  5F0 4B0  6F0 5B0 U1  7F0 6B0  8F0 7B0 | 8B0 U2
    stage 2   0F0 0B0  1F0 1B0  2F0 2B0 U0  3F0 3B0  4F0 4B0  5F0 5B0 U1  6F0 6B0  7F0 7B0  8F0 8B0 U2
              warm-up                                                                           drain

The pipeline is filled once and drained once. Update j turns version j into version j + 1 with the gradient of batch j at version
max(j - 1, 0): W(t+1) = W(t) - lr * grad f(W(t-1)); the first two batches use W(0). When stage s makes update j, p - 1 - s
micro-batches of batch j + 1 are in flight. A batch needs at least p micro-batches, otherwise a third version would be needed.

    version     0 0 1 2 3 ...  of batch 0 1 2 3 4 ...           W(v) is in buffer v mod 2: update j writes W(j+1) over W(j-1), and
    buffer      0 0 1 0 1 ...                                   micro-batches in flight continue to read W(j)

An update is usually a barrier: Megatron's optimizers compute the norm of the whole gradient, and tied embeddings sum both ends.
The last stage reaches it (p - 1) backwards before the first one, and would wait. With a second gradient buffer it continues, and
makes its update some backwards of the next batch later (`deferral`), when the first stage has reached it:

    stage 0   ... 4F0 2B0 U0  5F0 3B0  6F0 4B0  7F0 5B0 U1  8F0 6B0 | 7B0 8B0 U2
    stage 1   ... 3F0 2B0  4F0 3B0 U0  5F0 4B0  6F0 5B0  7F0 6B0 U1  8F0 7B0 | 8B0 U2
    stage 2   ... 2F0 2B0  3F0 3B0 U0  4F0 4B0  5F0 5B0  6F0 6B0 U1  7F0 7B0  8F0 8B0 U2
"""

from __future__ import annotations

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.schedule.flushes import warmup
from megatron_lynx.schedule.schedule import Action, paired

VERSIONS = 2
"""Copies of the weights."""


def version_of(micro_batch: int, microbatches: int) -> int:
    """Return a micro-batch's version (counted from 0 since filling). The paper: max(floor((k - 1) / m) - 1, 0), from 1."""
    return max(micro_batch // microbatches - 1, 0)


def buffer_of(version: int) -> int:
    return version % VERSIONS


def deferral(stage: int, backward_share: float = 2 / 3) -> int:
    """Return how many backwards of the next batch a stage runs before a barrier update, so that all stages reach it together.
    `backward_share`: of a forward and a backward."""
    return round(stage * backward_share)


def defers_more_than_before(stage: int) -> bool:
    """Return whether a stage runs one more backward before a deferred update than the stage before it.

    The exchange after the stage's last backward then follows the update: the stage before uses that gradient, and runs the
    forward whose output is needed next, after its own update only.

        stage 0   ... 4F0 2B0 U0  5F0 3B0        between 3B0 and U0 of stage 1: 3B0's gradient, 5F0's output
        stage 1   ... 3F0 2B0  4F0 3B0 U0  5F0
    """
    return stage > 0 and deferral(stage) > deferral(stage - 1)


def batch_order(
    pipeline: int, stage: int, microbatches: int, batch: int, *, deferral: int = 0, drains: bool = False
) -> tuple[Action, ...]:
    """Return one stage's steps after update `batch - 1` (or from the start), up to update `batch`.

    Unless it `drains`, forwards run ahead into the next batch, by one micro-batch per later stage and `deferral` pairs.
    `deferral`: backwards of the next batch before the update. Raises `ConfigError` as `check`.
    """
    check(pipeline, microbatches)
    assert 0 <= deferral <= stage, f"stage {stage} cannot wait for {deferral} backwards: two versions would not do"
    ahead = warmup(pipeline, stage)
    end = (batch + 1) * microbatches + (0 if drains else deferral)
    start = batch * microbatches + deferral if batch > 0 else 0
    forwards = [Action(index, "F") for index in range(start + ahead if batch > 0 else 0, end if drains else end + ahead)]
    backwards = [Action(index, "B") for index in range(start, end)]
    return paired(forwards, backwards, ahead if batch == 0 else 0)


def check(pipeline: int, microbatches: int) -> None:
    """Raise `ConfigError` if two versions do not suffice."""
    if microbatches < pipeline:
        problem = Problem(
            "micro-batches per update",
            str(microbatches),
            f"at least {pipeline}, one for each pipeline stage",
            "use more micro-batches, fewer stages, or 1F1B with flushes",
        )
        raise ConfigError("two versions of the weights are not enough for this batch", [problem])
