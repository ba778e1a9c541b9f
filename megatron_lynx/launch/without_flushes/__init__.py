"""`--lynx-schedule double-buffered`: Megatron's training loop, and a pipeline that is not emptied before each update.

refusals   what a launch may not ask for with it: told before a model is built
draining   behind which batches the pipeline is empty all the same: where weights are evaluated or saved, and where training ends
loop       around Megatron's training loop: the second version of the weights, the hooks, and both taken back
"""
