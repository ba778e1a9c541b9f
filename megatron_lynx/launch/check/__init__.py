"""`--lynx-check N`: the first N steps under a plan are also run as stock Megatron runs them, and compared bit for bit.

inside `train_step`, where Megatron calls its schedule:

    state taken │ hooks lifted: stock     │ state put back,   │ the plan     │ compared, ─┬─ equal: Megatron goes on from the plan's
                │ losses, gradients ─> host │ gradients zeroed │              │ all ranks │  gradients, as it would have without
                                                                                        └─ not: stock once more; what differs is named,
                                                                                           all ranks stop
check       one checked step
batches     what a step reads is read once and given to every pass
state       everything else that a pass changes: random numbers, buffers, FP8 scales, logged losses
outcome     losses and gradients of one pass, and the first difference between two
reference   which stock: without recomputation, or with full recomputation where the former does not fit in memory
"""
