"""What runs inside a training job: frames, their replay, the windows it runs in. Knows torch, never Megatron."""
