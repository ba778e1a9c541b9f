"""A kind that exists in tests alone: attention with a gate on what its core makes, one more linear and a sigmoid."""
