"""Orders and places in time, as data."""
