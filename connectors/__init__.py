"""Tools that reach enterprise systems, one file each."""
