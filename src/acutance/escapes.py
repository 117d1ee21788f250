"""Words of messages; external text safe to print: file names, names in models, foreign records.

Whatever is printed or written for people to read goes through :func:`visible`; spreadsheets and
terminals without Unicode have functions for their special characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: Control characters, marks that change a line's direction, line and paragraph separators,
#: zero-width characters, tags and lone surrogates.
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060\u2066-\u206f\ufeff"
    "\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


_NAMED = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def visible(text: str) -> str:
    r"""Escape control, invisible and direction-changing characters.

    Control characters, marks that change a line's direction, line and paragraph separators,
    zero-width characters and lone surrogates become an escape.

    Example:
        >>> print(visible("a\u202eb\x00c\ud800"))
        a\u202eb\x00c\ud800
        >>> visible("naïve 日本語 🙂")
        'naïve 日本語 🙂'
    """
    return _HIDDEN.sub(_escape, text)


def visible_lines(text: str) -> str:
    """Apply :func:`visible` to each line; line ends stay."""
    return "\n".join(map(visible, text.split("\n")))


def in_spreadsheet(text: str) -> str:
    """Make a text safe for spreadsheets by putting an apostrophe before a formula.

    Example:
        >>> in_spreadsheet("=1+1"), in_spreadsheet("layers.0")
        ("'=1+1", 'layers.0')
    """
    escaped = visible(text)
    return f"'{escaped}" if escaped.lstrip()[:1] in ("=", "+", "-", "@") else escaped


def _escape(match: re.Match[str]) -> str:
    part, point = match[0], ord(match[0])
    if point < 256:
        return _NAMED.get(part) or f"\\x{point:02x}"
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"


_ASCII = str.maketrans(
    {"–": "-", "−": "-", "×": "x", "…": "...", "│": "|", "·": "-", "•": "*", "²": "^2"}
    | {"≈": "~", "±": "+/-", "≤": "<=", "≥": ">=", "→": "->", "√": "sqrt ", "█": "#", "’": "'"}
    | {"β": "beta", "γ": "gamma", "λ": "lambda", "Λ": "Lambda", "σ": "sigma", "τ": "tau"}
    | {"Δ": "delta", "∞": "inf"}
)


def printable(text: str, ascii_only: bool = False) -> str:
    r"""Escape control characters, and replace what an ASCII terminal cannot show.

    Example:
        >>> print(printable("0–5 \x1b[31m"), printable("0–5 ³", ascii_only=True))
        0–5 \x1b[31m 0-5 ?
    """
    escaped = visible(text)
    if not ascii_only:
        return escaped
    return escaped.translate(_ASCII).encode("ascii", "replace").decode()


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "") -> str:
    """The end of an error about an unknown name: the nearest known one, else ``otherwise``.

    Example:
        >>> did_you_mean("entropi", ["entropy", "lse"]), did_you_mean("x", ["entropy"])
        ("; did you mean 'entropy'?", '')
    """
    from difflib import get_close_matches

    close = get_close_matches(str(name), list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]!r}?" if close else otherwise


def check_name(argument: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not one of those known.

    Raises:
        ValueError: naming the argument, what it may be, and the nearest.

    Example:
        >>> check_name("score", "dott", ["dot", "cosine"])
        Traceback (most recent call last):
        ValueError: score='dott' is not one of dot, cosine; did you mean 'dot'?
    """
    if name not in known:
        names = ", ".join(known)
        raise ValueError(f"{argument}={name!r} is not one of {names}{did_you_mean(name, known)}")


def ranges(numbers: Iterable[int], noun: str = "", comma: str = ", ") -> str:
    """Ascending numbers as ranges, behind what they number.

    Example:
        >>> ranges([3], "layer"), ranges([0, 1, 2, 5], "layer"), ranges([0, 1, 4], comma=",")
        ('layer 3', 'layers 0–2, 5', '0–1,4')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = comma.join(f"{run[0]}–{run[-1]}" if run[1:] else f"{run[0]}" for run in runs)
    plural = "s" * (sum(map(len, runs)) != 1)
    return f"{noun}{plural} {text}" if noun else text
