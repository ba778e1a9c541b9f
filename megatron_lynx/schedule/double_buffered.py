"""1F1B without flushes, and the version of the weights that each micro-batch sees (PipeDream-2BW).

    p = 3, m = 3, three batches          nF0, nB0 forward and backward of micro-batch n, Uj the update that batch j makes

    stage 0   0F0 1F0 | 2F0 0B0  3F0 1B0  4F0 2B0 U0  5F0 3B0  6F0 4B0  7F0 5B0 U1  8F0 6B0 | 7B0 8B0 U2
    stage 1   0F0 | 1F0 0B0  2F0 1B0  3F0 2B0 U0  4F0 3B0  5F0 4B0  6F0 5B0 U1  7F0 6B0  8F0 7B0 | 8B0 U2
    stage 2   0F0 0B0  1F0 1B0  2F0 2B0 U0  3F0 3B0  4F0 4B0  5F0 5B0 U1  6F0 6B0  7F0 7B0  8F0 8B0 U2
              warm-up                                                                           drain

The pipeline is filled once and drained once. Update j turns version j into version j + 1 with the gradient that batch j took
at version max(j - 1, 0): W(t+1) = W(t) - lr * grad f(W(t-1)), and the first two batches use W(0). When stage s makes update j,
p - 1 - s micro-batches of batch j + 1 are in flight, which is why a batch needs at least p of them: with fewer, a third version
would be needed.

    version     0 0 1 2 3 ...  of batch 0 1 2 3 4 ...           W(v) lives in buffer v mod 2: update j writes W(j+1) over W(j-1),
    buffer      0 0 1 0 1 ...                                   which nobody needs any more, and leaves W(j) to those in flight

An update is a barrier, as a rule: Megatron's optimizers take the norm of the whole gradient, clipping or not, and tied embeddings
want the sum of both ends. The last stage reaches it (p - 1) backwards before the first one, and so long it would stand still.
With a second gradient buffer it goes on instead, and makes its update some backwards of the next batch later (`deferral`), when
the first stage is there too:

    stage 0   ... 4F0 2B0 U0  5F0 3B0  6F0 4B0  7F0 5B0 U1  8F0 6B0 | 7B0 8B0 U2
    stage 1   ... 3F0 2B0  4F0 3B0 U0  5F0 4B0  6F0 5B0  7F0 6B0 U1  8F0 7B0 | 8B0 U2
    stage 2   ... 2F0 2B0  3F0 3B0 U0  4F0 4B0  5F0 5B0  6F0 6B0 U1  7F0 7B0  8F0 8B0 U2
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lynx.errors import ConfigError, Problem
from megatron_lynx.schedule import one_f_one_b
from megatron_lynx.schedule.schedule import Action

VERSIONS = 2
"""Copies of the weights that are ever needed at once."""


@dataclass(frozen=True, order=True, slots=True)
class Update:
    """The update that the gradient of one batch makes. Its text is like an action's: `U2`."""

    batch: int

    def __str__(self) -> str:
        return f"U{self.batch}"


def version_of(micro_batch: int, microbatches: int) -> int:
    """The version that a micro-batch (counted from 0 since the pipeline was filled) uses in forward, replay and backward.

    The paper counts from 1: max(floor((k - 1) / m) - 1, 0).
    """
    return max(micro_batch // microbatches - 1, 0)


def buffer_of(version: int) -> int:
    """The buffer, of two, that holds a version of the weights, or the gradient of a batch."""
    return version % VERSIONS


def deferral(stage: int, backward_share: float = 2 / 3) -> int:
    """Backwards of the next batch that a stage runs before an update that is a barrier, so that all stages reach it together.

    A gradient takes one backward per stage on its way to the first; a deferred one costs a forward and a backward, of which the
    backward is `backward_share` (0: no deferral; at most 1).
    """
    return round(stage * backward_share)


def defers_more_than_before(stage: int) -> bool:
    """Whether a stage runs more backwards before a deferred update than the stage before it, which is one more.

    What the two then exchange behind the stage's last backward is exchanged behind the update: the gradient that it made there
    serves a backward that the stage before runs only then, and so does the forward whose output it needs next.

        stage 0   ... 4F0 2B0 U0  5F0 3B0        between 3B0 and U0 of stage 1: 3B0's gradient, 5F0's output
        stage 1   ... 3F0 2B0  4F0 3B0 U0  5F0
    """
    return stage > 0 and deferral(stage) > deferral(stage - 1)


def batch_order(
    pipeline: int, stage: int, microbatches: int, batch: int, *, deferral: int = 0, drains: bool = False
) -> tuple[Action | Update, ...]:
    """What one stage does from behind update `batch - 1` (or from the start) up to update `batch`.

    Forwards run ahead into the next batch, by as many micro-batches as there are stages behind this one, and by `deferral` pairs
    of a forward and a backward; not if it `drains`.

    Args:
        deferral: backwards of the next batch before the update: at most `stage`.

    Raises:
        ConfigError: a batch has fewer micro-batches than the pipeline has stages.
    """
    check(pipeline, microbatches)
    assert 0 <= deferral <= stage, f"stage {stage} cannot wait for {deferral} backwards: two versions would not do"
    ahead = one_f_one_b.warmup(pipeline, stage)
    end = (batch + 1) * microbatches + (0 if drains else deferral)
    start = batch * microbatches + deferral if batch > 0 else 0
    forwards = [Action(index, "F") for index in range(start + ahead if batch > 0 else 0, end if drains else end + ahead)]
    backwards = [Action(index, "B") for index in range(start, end)]
    warmup = forwards[:ahead] if batch == 0 else []
    pairs = [action for pair in zip(forwards[len(warmup) :], backwards, strict=False) for action in pair]
    return (*warmup, *pairs, *backwards[len(pairs) // 2 :], Update(batch))


def order(pipeline: int, stage: int, microbatches: int, batches: int, *, deferral: int = 0) -> tuple[Action | Update, ...]:
    """What one stage does from start to drain. Raises as `batch_order` does."""
    return tuple(
        step
        for batch in range(batches)
        for step in batch_order(pipeline, stage, microbatches, batch, deferral=deferral, drains=batch == batches - 1)
    )


def check(pipeline: int, microbatches: int) -> None:
    """Raises `ConfigError` where two versions would not do."""
    if microbatches < pipeline:
        problem = Problem(
            "micro-batches per update",
            str(microbatches),
            f"at least {pipeline}, one for each pipeline stage",
            "use more micro-batches, fewer stages, or 1F1B with flushes",
        )
        raise ConfigError("two versions of the weights are not enough for this batch", [problem])
