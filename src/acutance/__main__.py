"""``python -m acutance`` is the ``acutance`` command."""

from acutance.cli import main

main()
