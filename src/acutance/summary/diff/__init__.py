"""What changed between two summaries."""
