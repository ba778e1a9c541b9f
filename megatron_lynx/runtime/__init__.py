"""The runtime: drops the activations that a plan recomputes, and recomputes them in waits. Imports torch, never Megatron."""
