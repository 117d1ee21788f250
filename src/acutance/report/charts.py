"""The charts of :mod:`acutance.report.figures`, under the name of the module that had them."""

from __future__ import annotations

from acutance.report.figures import CHARTS, draw, draw_layers, draw_lengths, draw_theory

__all__ = ["CHARTS", "draw", "draw_layers", "draw_lengths", "draw_theory"]
