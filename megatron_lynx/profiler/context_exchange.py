"""How long the core attention takes among context-parallel ranks, which exchange keys and values inside it.

    p2p          turn 0 on own keys | turn 1 | ... | turn c-1      in each turn but the last the next keys and values come in, in
                                                                   backward with their gradients: a turn is the slower of the two
    all_gather   k, v gathered | attention                         backward: gathered again | attention | dk, dv scattered
    a2a          q, k, v traded | attention | result traded        backward: its gradient traded | attention | dq, dk, dv traded
    a2a+p2p      traded in groups, the ring among them in between

Causal attention is balanced: a rank has the i-th slice of a sequence from its front and the i-th from its end, so turns are
equally long. Nothing of ours runs beside the exchange; what attention's own turns do not hide is in its seconds, and so exposed.

Source: `AttnFuncWithCPAndKVP2P`, `AttnFuncWithCPAndKVAllGather` and `AttnFuncWithCPAndQKVOA2A` of Transformer Engine 2.20.
"""

from __future__ import annotations

from megatron_lynx.profiler.exchanged import AttentionBytes
from megatron_lynx.profiler.latent import LatentShape
from megatron_lynx.profiler.roofline import Passes, Roofline
from megatron_lynx.profiler.shape import LayerShape


def exchanging_s(alone: Passes, shape: LayerShape, roof: Roofline) -> Passes:
    """The core attention with its exchange. `alone`: a rank's share of the work, without."""
    layout = shape.parallel
    if layout.context == 1:
        return alone
    if layout.context_exchange == "all_gather":
        return alone + _gathered_s(shape, roof)
    traders, turns = layout.context_groups
    return _in_turns(alone, turns, shape, roof) + _traded_s(traders, shape, roof)


def _exchanged_bytes(shape: LayerShape) -> AttentionBytes:
    """What a rank has of queries, keys, values and the result. Of latent attention values travel as narrow as they are."""
    if shape.model.latent is not None:
        return LatentShape.of(shape).attention_bytes()
    one = shape.model.element_bytes * shape.tokens
    query, key = one * shape.query_width, one * shape.key_width
    return AttentionBytes(query, key, key, query)


def _in_turns(alone: Passes, turns: int, shape: LayerShape, roof: Roofline) -> Passes:
    """Around a ring of so many ranks, or of groups, each rank of which has its heads of the whole group's rows."""
    if turns == 1:
        return alone
    _, key, value, _ = _exchanged_bytes(shape)
    arriving = key + value
    moved_s = roof.ring.seconds(arriving), roof.ring.seconds(2 * arriving)
    turns_s = alone.forward_s / turns, alone.backward_s / turns
    return Passes(*(turn + (turns - 1) * max(turn, moved) for turn, moved in zip(turns_s, moved_s, strict=True)))


def _gathered_s(shape: LayerShape, roof: Roofline) -> Passes:
    """Keys and values are gathered one after the other; in backward again, and their gradients are scattered."""
    others = shape.parallel.context - 1
    _, key, value, _ = _exchanged_bytes(shape)
    both_s = roof.ring.seconds(others * key) + roof.ring.seconds(others * value)
    return Passes(both_s, 2 * both_s)


def _traded_s(traders: int, shape: LayerShape, roof: Roofline) -> Passes:
    """Queries, keys, values and the result, each in a message of its own; in backward the gradients of all four."""
    if traders == 1:
        return Passes(0.0, 0.0)
    share = (traders - 1) / traders
    seconds = sum(roof.traders.seconds(share * message) for message in _exchanged_bytes(shape))
    return Passes(seconds, seconds)
