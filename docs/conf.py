"""The site: MyST pages, reference from docstrings, formulas as MathML, metrics from METRICS."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import version as installed_version
from typing import TYPE_CHECKING

import latex2mathml.converter
from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import acutance

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

project = "acutance"
author = "The acutance authors"
copyright = "2026, The acutance authors"
release = installed_version("acutance")
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "acutance"
html_static_path = ["_static"]
html_css_files = ["acutance.css"]

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # a class's Attributes section is the one place that describes its fields
napoleon_custom_sections = ["Source", "Shapes", "Edge cases"]

logger = logging.getLogger(__name__)


# Formulas become MathML while the site is built: browsers draw it themselves, so that a page needs
# neither a script nor a network.


# LaTeX sets "log n" with a thin space, latex2mathml without.
NAMED_FUNCTION = re.compile(r"\\(?:cos|erf|exp|log|sin|tanh)(?= *(?!\\left)(?:[^\W_]|\\))")

# What latex2mathml does not know it passes on as it stands: a \command, an environment's &.
UNKNOWN = re.compile(r"<m[io]>(\\\w+|&)</m[io]>")


def mathml(latex: str, node: nodes.Node, *, display: bool) -> str:
    latex = latex.replace("{aligned}", "{split}")  # the same layout; only split is known
    if r"\\" in latex and not latex.lstrip().startswith(r"\begin"):
        latex = rf"\begin{{split}}{latex}\end{{split}}"
    latex = NAMED_FUNCTION.sub(r"\g<0>\,", latex)
    try:
        result = latex2mathml.converter.convert(latex, display="block" if display else "inline")
        if unknown := UNKNOWN.search(result):
            raise ValueError(f"no MathML for {unknown[1]}")
    except Exception as error:  # each kind of bad input has its own exception
        logger.warning("cannot set %r: %r", latex, error, location=node)
        return ""
    return result


def visit_inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(mathml(node.astext(), node, display=False))
    raise nodes.SkipNode


def visit_display_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(translator.starttag(node, "div", CLASS="formula"))
    translator.body.append(mathml(node.astext(), node, display=True))
    translator.body.append("</div>\n")
    raise nodes.SkipNode


class MetricsTable(SphinxDirective):
    """One row for each entry of `acutance.METRICS`, in its order."""

    def run(self) -> list[nodes.Node]:
        table = acutance.METRICS
        metrics = list(table.values() if isinstance(table, Mapping) else table)
        if not metrics:
            raise ExtensionError("acutance.METRICS is empty: the metrics page would have no table")
        lines = [":::{list-table}", ":header-rows: 1", ""]
        lines += self.row("metric", "symbol", "unit", "range", "meaning", "source")
        for metric in metrics:
            symbol = f"${metric.symbol.strip('$')}$"
            lines += self.row(
                f"`{metric.name}`", symbol, metric.unit, metric.range, metric.meaning, metric.source
            )
        return self.parse_text_to_nodes("\n".join([*lines, ":::"]))

    @staticmethod
    def row(*cells: str) -> list[str]:
        return [f"{'* -' if i == 0 else '  -'} {cell}" for i, cell in enumerate(cells)]


def skip_named_tuple_field(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Leave out "Alias for field number 0": the Attributes section says what the field is."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(visit_inline_math, None),
        block_renderers=(visit_display_math, None),
    )
    app.connect("autodoc-skip-member", skip_named_tuple_field)
    app.add_directive("metrics-table", MetricsTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


html_math_renderer = "mathml"
