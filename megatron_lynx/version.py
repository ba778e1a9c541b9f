"""The version, stated once: setup.py, `megatron-lynx --version` and every plan's provenance read it here."""

__version__ = "0.1.0"
