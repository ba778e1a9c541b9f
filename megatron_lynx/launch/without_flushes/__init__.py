"""`--lynx-schedule double-buffered`: lets Megatron's training loop train with a pipeline that is not emptied before each update.

refusals   what a launch may not ask for with it, told before a model is built
draining   batches behind which the pipeline must be empty: where weights are evaluated or saved, and where training ends
loop       sets up the second version of the weights and the hooks around Megatron's training loop, and undoes both
"""
