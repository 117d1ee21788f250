"""Summary: what a probe knows of every head; it merges and is written to files."""
