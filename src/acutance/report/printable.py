"""Text that a terminal can show: no control characters, and no letters that it lacks."""

from __future__ import annotations

__all__ = ["printable"]

_ASCII = str.maketrans(
    {"–": "-", "−": "-", "×": "x", "…": "...", "│": "|", "·": "-", "²": "^2", "∞": "inf"}
    | {"≈": "~", "±": "+/-", "≤": "<=", "≥": ">=", "→": "->", "√": "sqrt ", "█": "#", "’": "'"}
    | {"β": "beta", "γ": "gamma", "λ": "lambda", "Λ": "Lambda", "σ": "sigma", "τ": "tau"}
)


def printable(text: str, ascii_only: bool = False) -> str:
    r"""Without control characters, which could drive a terminal, or what it cannot encode.

    Example:
        >>> printable("0–5 \x1b[31m"), printable("0–5 ³", ascii_only=True)
        ('0–5 �[31m', '0-5 ?')
    """
    shown = "".join(part if part.isprintable() else "�" for part in text)
    if not ascii_only:
        return shown
    return shown.translate(_ASCII).encode("ascii", "replace").decode()
