"""Compare two summaries head by head."""
