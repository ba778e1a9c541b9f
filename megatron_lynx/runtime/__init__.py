"""The runtime: drops the activations that a plan recomputes, and recomputes them in waits. Imports torch, never Megatron.

engine                   interface of the hooks; `order` has the passes in flight
  progress               state that the parts share; a `Run` is one call of a half, to which sites and collectives report
  record                 runs a half, and replaces saved tensors by handles of its `frame`
    recorded_graph         which saved tensors of which autograd nodes (`saved`) are replaced; `site` is one submodule's call
  recompute                 recomputes a half, under the `surroundings` of its record
  weight_gradients       delayed weight gradients; pending ones run in waits
  offload/               activations in host memory
device, cuda             streams, events and memory; `trace` times them
refusals                 errors for training steps that recomputation cannot support
"""
