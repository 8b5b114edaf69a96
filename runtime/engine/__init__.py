"""What serves tokens: one protocol, an HTTP client for every engine, and an embedded engine."""
