"""What of a device's memory a plan leaves alone, as a cluster's description says it: in parts, each with its source.

   what PyTorch reports = context [1] + libraries [2] + buffers of NCCL [3] + allocator's slack [4] + what a plan may use

[1] of CUDA: the driver's share, and kernels of PyTorch
[2] code of other libraries, which is loaded when it is first called. Their workspaces PyTorch allocates: these a plan counts
[3] by communicator: the layout decides how many there are (`config.communicators`)
[4] what PyTorch's allocator has reserved and nobody has
"""

from __future__ import annotations

from pydantic import Field

from megatron_lynx.validation import Part


class NcclChannels(Part):
    """How many channels NCCL opens, each of which has buffers for every neighbour."""

    within_node: int = Field(ge=1)
    """Of a communicator whose ranks are all in one node (of one NVLink domain)."""
    between_nodes: int = Field(ge=1)
    of_peers: int = Field(ge=1)
    """Between two ranks of a node that send to each other: messages, exchanges of tokens."""
    multicast: bool = False
    """Whether switches add up for them (NVLink SHARP), which takes buffers of its own."""


class AllocatorSlack(Part):
    """What PyTorch has reserved and not allocated when it is fullest."""

    expandable_gib: float = Field(ge=0)
    """With `expandable_segments:True`."""
    fixed_gib: float = Field(ge=0)
    """Without."""


class Reserve(Part):
    """The parts, as far as the layout does not decide them."""

    context_gib: float = Field(ge=0)
    libraries_gib: float = Field(ge=0)
    nccl: NcclChannels
    allocator: AllocatorSlack
