"""Built-in domains, one folder each."""
