"""What runs inside a training job: it drops what a plan recomputes, and computes it again in waits. Knows torch, never Megatron.

engine                   what hooks talk to; `progress` is the state that its parts share, `order` the passes in flight
  run                    one call of a half, to which its sites and collectives report
  record                 a half runs, and what it saves for backward becomes handles of its `frame`
    recorded_graph         which of the saved tensors of autograd's nodes (`saved`) those are; `site` is one submodule's call
    watched                the same for an observer, who checks what backward gets
  replay                 the half's code makes them again, under the `surroundings` of the record, without `forward_hooks`
  tasks                  at each moment that a pass reaches, what the plan has put there runs
  waits                  which window a wait for communication is
  weight_gradients       those that backward left for later are `pending`, and run in waits
  offload/               activations in host memory
device, cuda             streams, events and memory of whatever computes; `trace` times them
refusals                 what a training step may not ask of activations that are recomputed
loss_in_pieces           logits of a part of the tokens at a time
"""
