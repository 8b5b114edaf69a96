"""Training: recorded trajectories in, a LoRA adapter out, in a process of its own."""
