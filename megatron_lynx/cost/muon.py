"""Muon (`--optimizer muon`, `dist_muon`, `adaptive_muon`): its parameters, bytes and seconds.

    matrices     weights of layers' linears and experts, not word embeddings or the output projection: main 4, momentum 4;
                 for `adaptive_muon` a second moment, 4
    all others   Adam's (`cost.parameters`)

An update orthogonalizes the momentum of every matrix, m x n with m <= n, by Newton-Schulz steps in bf16, each tensor-parallel
rank its part (`--muon-tp-mode blockwise`), queries, keys and values apart:

    X X^T    B = b A + c A A    a X + B X          2 m m n  +  2 m m m  +  2 m m n  FLOPs a step

Without the distributed optimizer every rank steps all. With it (`LayerWiseDistributedOptimizer`) each rank steps whole matrices:
the fullest rank an even share or the largest matrix. From 0.18 on all ranks' buffers have equal sizes. Source: megatron-core
0.16.1 to 0.19.2 (`muon.py`, `emerging_optimizers.py`, `layer_wise_optimizer.py`) and NVIDIA-NeMo/Emerging-Optimizers
(`newton_schulz`). Seconds leave out routers, a thousandth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import NamedTuple

from megatron_lynx.config.job import Job
from megatron_lynx.cost.parameters import FP32_BYTES, bytes_each, embeds_on, optimizer_bytes, sections_on
from megatron_lynx.kinds.dense.section import LINEAR_QKV
from megatron_lynx.kinds.experts.planning import expert_sharers
from megatron_lynx.kinds.planning import planning_of
from megatron_lynx.profiler.shape import LayerShape

IN_HAND_BYTES = 16
"""Bytes per number while a matrix is orthogonalized: momentum, X before its cast, and the result in fp32; X twice in bf16."""


class Matrices(NamedTuple):
    small: int
    large: int
    times: int
    experts: bool

    @property
    def numbers(self) -> int:
        return self.small * self.large


def matrices(job: Job, stage: int, *, split: bool = True) -> Iterator[Matrices]:
    """Yield the matrices of a stage's layers, and learned positions, which Megatron treats as one. `split`: queries, keys and
    values apart."""
    shape = LayerShape.of(job)
    for section, count in sections_on(job, stage).items():
        for name, linear in planning_of(section).linears(shape).items():
            apart = split and name == LINEAR_QKV
            for made in (shape.query_width, shape.key_width, shape.key_width) if apart else (linear.made,):
                small, large = sorted((made, linear.taken))
                yield Matrices(small, large, count * linear.times, section.of_name[name].of_experts)
    if job.model.position == "learned" and embeds_on(job, stage):
        small, large = sorted((job.model.seq, job.model.hidden))
        yield Matrices(small, large, 1, experts=False)


def _shared(job: Job, all_matrices: list[Matrices]) -> Iterator[tuple[int, list[Matrices]]]:
    yield job.parallel.context * job.replicas, [matrix for matrix in all_matrices if not matrix.experts]
    yield expert_sharers(job), [matrix for matrix in all_matrices if matrix.experts]


def fullest(job: Job, all_matrices: list[Matrices], of: Callable[[Matrices], float]) -> float:
    total = 0.0
    for sharers, group in _shared(job, all_matrices):
        share = sum(matrix.times * of(matrix) for matrix in group) / (sharers if job.parallel.distributed_optimizer else 1)
        total += max([share, *map(of, group)])
    return total


def spared_bytes(job: Job, stage: int) -> int:
    if not job.optimizer.muon_steps:
        return 0
    sizes, stage_matrices = bytes_each(job), list(matrices(job, stage, split=False))
    of_others, of_experts = (
        sum(one.times * one.numbers for one in stage_matrices if one.experts is experts) for experts in (False, True)
    )
    as_adam = optimizer_bytes(job, of_others + of_experts, of_experts)
    rank_numbers = fullest(job, stage_matrices, lambda one: one.numbers)
    return as_adam - ceil(rank_numbers * (sizes.main_parameter + FP32_BYTES * job.optimizer.matrix_states))


def filled_numbers(job: Job, stage: int) -> int:
    """Return the padding of a stage's buffers, in numbers, to equal sizes on all ranks."""
    if not job.optimizer.muon_steps or not job.parallel.distributed_optimizer:
        return 0
    filled = 0
    for sharers, group in _shared(job, list(matrices(job, stage, split=False))):
        largest = max((matrix.numbers for matrix in group), default=0)
        filled += max(0, sharers * largest - sum(matrix.times * matrix.numbers for matrix in group))
    return filled


def in_hand_bytes(job: Job, stage: int) -> int:
    if not job.optimizer.muon_steps:
        return 0
    return IN_HAND_BYTES * max((matrix.numbers for matrix in matrices(job, stage)), default=0)


def newton_schulz_s(job: Job, stage: int) -> float:
    """Return the seconds of one update's products on the fullest rank; 0 if the cluster's GEMMs are not described."""
    matmul, steps = job.cluster.matmul, job.optimizer.muon_steps
    if matmul is None or not steps:
        return 0.0

    def seconds(matrix: Matrices) -> float:
        square, whole = 2 * matrix.small**3, 2 * matrix.small * matrix.numbers
        return steps * (matmul.gemm_s(square, "bf16") + 2 * matmul.gemm_s(whole, "bf16"))

    return fullest(job, list(matrices(job, stage)), seconds)
