"""The benchmark of the CPU: what statistics cost beside attention alone, behind a correctness gate.

A case names shapes and the ways of computing them that compete; each way is first checked against a
float64 reference, then timed in turns with the others, and where the case says so measured for
memory in a process of its own. ``python -m benchmarks`` runs it.
"""
