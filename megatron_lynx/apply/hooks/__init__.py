"""One file per hook on Megatron. Each header says which function is replaced and why, how the original is called, which state the
hook keeps, and when it passes through."""
