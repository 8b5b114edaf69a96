"""Turns runs into a better adapter, or refuses. Sync throughout."""
