"""The REST face of the runtime."""
