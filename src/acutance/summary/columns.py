"""Columns: results that are a table of columns, for Arrow and pandas."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow


class Columns:
    """Base of results whose ``columns()`` is a table."""

    def columns(self) -> dict[str, list[Any]]:
        """The table as columns."""
        raise NotImplementedError

    def to_arrow(self) -> pyarrow.Table:
        """The columns as a pyarrow table."""
        import pyarrow

        return pyarrow.table(self.columns())

    def to_frame(self) -> Any:
        """The columns as a pandas DataFrame, or as a pyarrow table without pandas."""
        if importlib.util.find_spec("pandas") is None:
            return self.to_arrow()
        import pandas

        return pandas.DataFrame(self.columns())
