"""`python -m tests.testbed.ordinary_user`: seconds of an all-reduce over a link, with none of root's capabilities."""

from __future__ import annotations

from megatron_lynx.testbed.links import Links
from megatron_lynx.testbed.ranks import RankPool, run_ranks
from tests.nursery.process import start_rank
from tests.testbed.links_on_ranks import drop_capabilities, unprivileged_all_reduce_s

if __name__ == "__main__":
    drop_capabilities()
    RankPool.process = start_rank  # type: ignore[method-assign, assignment]
    print(*run_ranks(unprivileged_all_reduce_s, 2, 250_000, links=Links(20)))
