"""What a replay ended with: everything is over, or who waits for what.

Deadlock with 1 hardware queue
  rank 0, in update 0: the host waits in barrier for barrier on world of 0, 1
    under way: barrier on world of 0, 1
  rank 1, in update 0: the host waits in torch.cuda.synchronize for pp of 0, 1
    under way: receive from rank 0 on pp of 0, 1
    queue 0: send to rank 0 on pp of 0, 1, behind receive from rank 0; it holds up 2 others
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StuckRank:
    """One rank when nothing moves any more.

    Attributes:
        rank: which.
        mark: where its host is, as its log says.
        host: what its host waits for; empty if it came to its end.
        under_way: collectives and messages whose other sides are not there.
        heads: what each queue begins with, why that cannot go, and how much it holds up.
    """

    rank: int
    mark: str
    host: str
    under_way: tuple[str, ...]
    heads: tuple[str, ...]

    def __str__(self) -> str:
        place = f", in {self.mark}" if self.mark else ""
        lines = [f"rank {self.rank}{place}: {self.host or 'the host came to its end'}"]
        lines += [f"  under way: {text}" for text in self.under_way]
        return "\n".join([*lines, *(f"  {text}" for text in self.heads)])


@dataclass(frozen=True)
class Outcome:
    """What became of the logs of all ranks.

    Attributes:
        hardware_queues: of each device.
        stuck: every rank, if nothing moves any more and not all is over: a deadlock.
        ran: the names of the kernels that each rank's device came to, in order.
    """

    hardware_queues: int
    stuck: tuple[StuckRank, ...]
    ran: tuple[tuple[str, ...], ...]

    @property
    def finished(self) -> bool:
        return not self.stuck

    def __str__(self) -> str:
        queues = f"{self.hardware_queues} hardware queue{'s' if self.hardware_queues > 1 else ''}"
        if self.finished:
            return f"Finished with {queues}"
        ranks = "\n".join(map(str, self.stuck))
        return f"Deadlock with {queues}\n" + "\n".join(f"  {line}" for line in ranks.splitlines())
