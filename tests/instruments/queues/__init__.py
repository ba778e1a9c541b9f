"""Finds hangs that only a GPU would have: replays together what all ranks gave their streams, with one hardware queue or several.

CPU ranks, real megatron-core         this process, pure Python
recorder ──> one Log a rank ────────> replay(logs, hardware_queues=1) ──> Outcome: finished, or who waits for whom
                                      differences(logs)               ──> collectives in another order on one rank

log           what a rank's host did: kernels, waits, collectives, messages, host synchronisation, with their streams
recorder      notes that on a rank, wherever torch.distributed or the runtime's device seam is called
device        one GPU: streams that share hardware queues, whose heads hold up what is behind them
rendezvous    NCCL: when collectives and messages that are under way are over
hosts         how far each host gets
replay        all of it together, until nothing moves any more
outcome       what is left then, in words
hidden        which kernels run while a message is awaited
unawaited     receives and collectives that nobody waits for
differences   what can be said without a replay
"""
