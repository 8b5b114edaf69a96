"""Release: adapters as immutable files with lineage, loaded, probed, switched to, rolled back."""
