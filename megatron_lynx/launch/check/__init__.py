"""`--lynx-check`: the first steps under a plan are compared bit for bit, with stock or, `frames`, with what forward saved.

`--lynx-check N` also runs each step as stock. Inside `train_step`, where Megatron calls its schedule:

    state taken │ hooks lifted: stock       │ state put back,  │ the plan │ compared,  ─┬─ equal: Megatron goes on from the plan's
                │ losses, gradients to host │ gradients zeroed │          │ all ranks   │  gradients, as it would have without
                                                                                      └─ not: stock once more; all ranks stop,
                                                                                         and what differs is named
check           the count of checked steps, which stock each is compared with, its passes, and the errors where one differs
training_state  what a pass reads and changes: batches, random numbers, buffers, FP8 scales, logged losses
outcome         losses and gradients of one pass, and the first difference between two

`--lynx-check frames` compares what recomputations and reloads made with what forward had saved, whatever backward does with it:
frames          the steps in which frames are checked, which frames, and each of their saved tensors
"""
