"""The figures that seconds on GPUs are predicted from, each beside what one GPU here takes: is the cluster's file right?

    rates        GEMMs of several shapes, copies in device memory, copies to the host and back, the least that a kernel takes
    profiles     one layer of a model, measured as `megatron-lynx profile` does it, beside its analytic price, item by item; and
                 what Python takes for a layer on this machine
    figure       one of them: stated, measured, their ratio
    page         tables: first what differs by more than 8 %

`python -m benchmarks.gpu_figures` runs it; benchmarks/README.md says how.
"""
