"""What trains under a launch: Megatron-LM's scripts, or Megatron-Bridge's. One file each, with the same face (`host.Host`)."""

from __future__ import annotations

from megatron_lynx.launch.flags import BRIDGE
from megatron_lynx.launch.hosts.host import Host


def host_named(name: str) -> Host:
    """The host that `--lynx-host` names. Nothing of it is imported before it is asked for its claims."""
    if name == BRIDGE:
        from megatron_lynx.launch.hosts.bridge import Bridge

        return Bridge()
    from megatron_lynx.launch.hosts.megatron_lm import MegatronLM

    return MegatronLM()
