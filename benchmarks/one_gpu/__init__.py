"""What is predicted of seconds and bytes on a GPU, beside what one GPU takes at real sizes; stock Megatron is measured with it.

    subjects    the models: layers of Llama 3 8B, layers that wait for Python, layers of GPT 13B, one stage of a pipeline
    settings    stock's and ours, each with its Candidate; plans come from the planner
    predicted   what price list and simulator say of each
    running     each subject in a process of its own: a setting that fails is recorded, and the next one has its turn
      trained   a model under a setting: Megatron's DDP and optimizer, one set of weights for all settings
      measured  seconds, bytes, bits of one setting
    page        tables: predicted, measured, their ratio

`python -m benchmarks.one_gpu` runs it; benchmarks/README.md says how. A dry run (`--dry-run`) does all of it on a CPU rank with
tiny layers, which shows that it runs and nothing else.
"""
