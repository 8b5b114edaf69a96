"""Evaluation: what the samples say, how surely, and what the gate makes of it."""
