"""What a rank says that ran out of device memory: where and when, what was planned, what is held, and what would fit.

allocator    the figures of PyTorch's allocator, from what it says
moment       which moment of a step it was: what the engine noted on the error, and what the traceback passes through
held         what parameters, gradients and the optimizer take
explanation  all of it, as an error of ours, with the nearest change of plan or launch, as a command
"""
