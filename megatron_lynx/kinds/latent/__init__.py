"""Multi-latent attention, and sparse attention over its compressed keys and values."""
