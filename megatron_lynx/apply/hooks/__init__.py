"""One file per hook on Megatron. Each says what it replaces, why, how it calls the original, what it holds, and when it passes
through."""
