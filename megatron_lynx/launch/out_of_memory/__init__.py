"""What a rank says that ran out of device memory: where and when, what was planned, what is held, and what would fit.

watch        an error in a script, or in a step, that is one of memory becomes ours
moment       which moment of a step it was: what the engine noted on the error, and what the traceback passes through
explanation  the allocator's figures, what states take, and the nearest change of plan or launch, as a command
"""
