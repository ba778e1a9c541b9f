"""Measures training steps: seconds and bytes of activations, in the same way for every setting."""
