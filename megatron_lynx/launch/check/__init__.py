"""`--lynx-check`: the first steps under a plan are compared bit for bit, with stock or, `frames`, with what forward saved.

`--lynx-check N` also runs each step as stock. Inside `train_step`, where Megatron calls its schedule:

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

`--lynx-check frames` compares what replays and reloads made with what forward had saved, whatever backward does with it:
frames          the steps in which frames are checked
draw            which frames: a few in each step, of all kinds
original        one saved tensor, and whether backward got the same bits
"""
