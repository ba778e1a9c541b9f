"""Hosts of a job's ranks on this machine: processes, link and device.

job.cluster: device cpu, link 400 Mbit/s   ─>  two emulated hosts, a shaped link
job.cluster: device cpu, no link           ─>  loopback
job.cluster: device cuda                   ─>  this machine's GPUs
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megatron_lynx.config.job import Job
from megatron_lynx.errors import ConfigError, LynxError, Problem
from megatron_lynx.measure.measurement import Links as LinkFacts
from megatron_lynx.testbed.fusions import compiler_for, fusion_problems
from megatron_lynx.testbed.links import Links
from megatron_lynx.testbed.ranks import RankError, run_ranks
from megatron_lynx.testbed.stand_in import named_stand_ins

if TYPE_CHECKING:
    from megatron_lynx.testbed.fusions import Backend

LONGEST_RUN_S = 1800.0


@dataclass(frozen=True)
class Hosts:
    """Where the ranks of a job run. Made by `hosts_for`, which closes the network."""

    ranks: int
    device: Literal["cpu", "cuda"]
    network: Links
    links: LinkFacts
    compiler: Backend | None = None
    """`torch.compile` backend of the job's fusions; None: nothing is compiled."""

    @property
    def description(self) -> str:
        return "one rank, no links" if self.ranks == 1 else self.network.description

    def run(
        self, function: Callable[..., Any], *args: Any, unshaped: bool = False, env: Mapping[str, str] | None = None
    ) -> list[Any]:
        """Run `function(rank, *args)` on fresh ranks; return the results by rank.

        `unshaped` ignores the link's rate. Raises errors of this package as they are, others as `RankError`.
        """
        network = Links() if unshaped else self.network
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}
        try:
            return run_ranks(
                function,
                self.ranks,
                *args,
                links=network,
                env={**hidden, **(env or {})},
                compiler=self.compiler,
                timeout_s=LONGEST_RUN_S,
            )
        except RankError as error:
            if isinstance(error.__cause__, LynxError):
                raise error.__cause__ from None
            if error.lost:
                todo = "was it killed? by the out-of-memory killer, perhaps: `dmesg` would say so"
                raise LynxError("a rank was lost", [Problem(f"rank {error.rank}", error.text, "an answer", todo)]) from None
            raise


@contextmanager
def hosts_for(job: Job) -> Iterator[Hosts]:
    """Yield the hosts of a job. Raises `ConfigError` if this machine cannot run it."""
    _check(job)
    shaped = job.cluster.device == "cpu" and job.gpus > 1
    with Links(job.cluster.link_mbit_per_s if shaped else None) as network:
        yield Hosts(job.gpus, job.cluster.device, network, _facts(job, network), compiler_for(job))


def _facts(job: Job, network: Links) -> LinkFacts:
    if job.gpus == 1:
        return LinkFacts(kind="none")
    if job.cluster.device == "cuda":
        return LinkFacts(kind="device")
    return LinkFacts(kind="loopback" if network.rate_mbit is None else "shaped", mbit_per_s=network.rate_mbit)


def _check(job: Job) -> None:
    problems = []
    if job.cluster.device == "cuda" and (found := _gpus()) < job.gpus:
        problems.append(
            Problem("job: gpus", f"{job.gpus}", f"at most {found}, the GPUs of this machine", "or cluster.device: cpu")
        )
    if job.cluster.device == "cpu" and job.gpus > MOST_RANKS_PER_CORE * (cores := len(os.sched_getaffinity(0))):
        needed = f"at most {MOST_RANKS_PER_CORE * cores}, {MOST_RANKS_PER_CORE} for each core of this machine"
        problems.append(Problem("job: gpus", f"{job.gpus} processes", needed))
    if job.parallel.context > 1 and job.cluster.device == "cpu" and named_stand_ins() is None:
        needed = "1: on CPU ranks no attention exchanges keys and values"
        problems.append(Problem("job: parallel.context", f"{job.parallel.context}", needed))
    if job.model.vocab % job.parallel.tensor:
        needed = f"a multiple of parallel.tensor ({job.parallel.tensor})"
        problems.append(Problem("job: model.vocab", f"{job.model.vocab}", needed, "pad it, as Megatron's training scripts do"))
    if job.model.attention == "flash" and not (job.model.uses_te and job.cluster.device == "cuda"):
        todo = "the testbed's local layers keep the scores, and so do all on a CPU"
        problems.append(Problem("job: model.attention", "flash", "unfused", todo))
    problems += fusion_problems(job)
    if problems:
        raise ConfigError("this job cannot be run on this machine", problems)


MOST_RANKS_PER_CORE = 4
"""More ranks would only wait for each other."""


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
