"""What fused attention keeps of queries, keys and values where context-parallel ranks exchange them.

p2p          its own queries, and the keys and values that came last around the ring
all_gather   its own queries, keys and values, which a replay can make again
a2a          what it got for its heads, and the result as it was before it was traded back
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lynx.anatomy.dense import CORE_ATTENTION
from megatron_lynx.config.parallel import Parallel
from megatron_lynx.profiler.profile import SavedTensor


class AttentionBytes(NamedTuple):
    """What the core attention takes and makes on one rank. Of latent attention values are narrower than keys."""

    query: int
    key: int
    value: int
    result: int


def kept_beside_exchange(layout: Parallel, given: AttentionBytes, handed_on: str) -> list[SavedTensor]:
    """The blocks that it keeps. `handed_on`: the item that made queries, keys and values."""
    traders, _ = layout.context_groups
    own_queries = handed_on if traders == 1 else CORE_ATTENTION
    own_keys = handed_on if layout.context_exchange == "all_gather" else CORE_ATTENTION
    made = ((given.query, own_queries), (given.key, own_keys), (given.value, own_keys))
    before_trade = ((given.result, CORE_ATTENTION),) if traders > 1 else ()
    return [SavedTensor(bytes=size, made_by=item, saved_by=(CORE_ATTENTION,)) for size, item in (*made, *before_trade)]
