"""Runs one task safely and records what happened. Async throughout."""
