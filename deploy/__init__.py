"""Wires connectors, domains, stores and engines by name and starts the processes."""
