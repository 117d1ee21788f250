"""The fuzzer is a script: its tests, and the collection of examples, import its parts by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
