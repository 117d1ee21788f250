"""Text that a terminal can show: no control characters, and no letters that it lacks."""

from __future__ import annotations

from acutance.escapes import visible

__all__ = ["printable"]

_ASCII = str.maketrans(
    {"–": "-", "−": "-", "×": "x", "…": "...", "│": "|", "·": "-", "²": "^2", "∞": "inf"}
    | {"≈": "~", "±": "+/-", "≤": "<=", "≥": ">=", "→": "->", "√": "sqrt ", "█": "#", "’": "'"}
    | {"β": "beta", "γ": "gamma", "λ": "lambda", "Λ": "Lambda", "σ": "sigma", "τ": "tau"}
)


def printable(text: str, ascii_only: bool = False) -> str:
    r"""With control characters as escapes, and without what the terminal cannot encode.

    Example:
        >>> print(printable("0–5 \x1b[31m"), printable("0–5 ³", ascii_only=True))
        0–5 \x1b[31m 0-5 ?
    """
    shown = visible(text)
    if not ascii_only:
        return shown
    return shown.translate(_ASCII).encode("ascii", "replace").decode()
