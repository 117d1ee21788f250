"""Benchmarks: ``python -m benchmarks`` is that of the CPU; the other files are programs."""
