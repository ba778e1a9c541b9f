"""`--lynx-check N`: the first N steps under a plan are also run as stock Megatron runs them, and compared bit for bit.

inside `train_step`, where Megatron calls its schedule:

    state taken │ hooks lifted: stock       │ state put back,  │ the plan │ compared,  ─┬─ equal: Megatron goes on from the plan's
                │ losses, gradients to host │ gradients zeroed │          │ all ranks   │  gradients, as it would have without
                                                                                      └─ not: stock once more; all ranks stop,
                                                                                         and what differs is named
check           the count of checked steps, and which stock each is compared with
step            one checked step: passes over it, each from the same state
batches         what a step reads is read once and given to every pass
training_state  everything else that a pass changes: random numbers, buffers, FP8 scales, logged losses
outcome         losses and gradients of one pass, and the first difference between two
reference       which stock: without recomputation, or with full recomputation where the former does not fit in memory
verdict         the errors where something differs
"""
