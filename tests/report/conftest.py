"""Summaries made from given rows."""

from tests.contract.report.conftest import cache_plan, summary_of

__all__ = ["cache_plan", "summary_of"]
