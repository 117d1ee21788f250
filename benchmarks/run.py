"""``acutance bench`` from a checkout: ``python benchmarks/run.py --help``."""

from __future__ import annotations

import sys

from acutance.cli import app

if __name__ == "__main__":
    app(["bench", *sys.argv[1:]], prog_name="acutance")
