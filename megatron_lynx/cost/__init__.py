"""What a job costs: seconds, bytes and FLOPs, each formula in one place."""
