"""`--lynx-check`: compares the first steps under a plan bit for bit, with stock or, `frames`, with what forward saved.

`--lynx-check N` also runs each step as stock. Inside `train_step`, where Megatron calls its schedule:

    state saved │ hooks lifted: stock       │ state restored,  │ the plan │ compared on ─┬─ equal: training continues
                │ losses, gradients to host │ gradients zeroed │          │ all ranks    └─ not: stock again, the difference is
                                                                                            printed, and all ranks exit
check           counts checked steps, runs the passes, and reports a difference
training_state  saves and restores what a pass changes: batches, random numbers, buffers, FP8 scales, logged losses
outcome         losses and gradients of one pass, and the first difference between two

`--lynx-check frames` runs nothing twice:
frames          compares tensors that backward gets from recomputations and reloads with the saved ones
"""
