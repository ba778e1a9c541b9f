"""The usual attention and the MLP."""
