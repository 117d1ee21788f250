"""``acutance report``, ``diff`` and ``merge`` as a shell user meets them: no model is run."""

from __future__ import annotations

import subprocess
import sys


def test_help_of_every_command_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from acutance.cli import app\n"
        "from acutance.cli.options import OWN\n"
        "assert {'probe', 'merge', 'report', 'diff', 'predict', 'compare'} <= set(OWN)\n"
        "for name in OWN:\n"
        "    assert CliRunner().invoke(app, [name, '--help']).exit_code == 0, name\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules or 'pyarrow' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
