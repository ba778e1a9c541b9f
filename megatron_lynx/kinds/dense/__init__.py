"""Dense attention and MLP."""
