"""Mixtures of experts, in place of a layer's MLP."""
