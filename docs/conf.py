"""The site: MyST pages, reference from docstrings, formulas as MathML, metrics from METRICS."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING

import latex2mathml.converter
import typer
from docutils import nodes
from sphinx.errors import ExtensionError
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective
from sphinx.util.math import get_node_equation_number

import acutance
from acutance import cli

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

project = "acutance"
author = "The acutance authors"
copyright = "2026, The acutance authors"
release = installed_version("acutance")
version = release

#: Where the sources are, as pyproject.toml says; pages write {{ repository }}, in code too.
repository = re.search(
    r'^Repository = "(.+?)"',
    (Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"),
    re.MULTILINE,
)[1]

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
numfig = True  # equation 9 of page 7 is (7.9), so that pages can refer to one another

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


# LaTeX sets "2 log n" with thin spaces, latex2mathml without.
NAMED_FUNCTION = re.compile(
    r"\\(?:cosh?|coth|erf|exp|log|sinh?|tanh)(?![a-z])(?= *(?!\\left)(?:[^\W_]|\\))"
)
BEFORE_FUNCTION = re.compile(
    r"((?<![\\A-Za-z])[A-Za-z]|[0-9})\]]|\\(?:beta|gamma|kappa|lambda|sigma))"
    r" *(?=\\(?:cosh?|coth|erf|exp|log|max|min|sinh?|tanh)(?![a-z]))"
)

# Browsers set a stroke, a bar, a sign and a single capital Greek letter otherwise than LaTeX does.
FINISH = [
    (
        re.compile(
            r"(<mo[^>]*>(?:[(\[=,]|&#x(?:00028|0003[CDE]|0005B|02192|02248|0226[45]);)</mo>"
            r"(?:<mspace[^>]*>)?)<mo>(&#x02212;)</mo>"
        ),
        r'\1<mo form="prefix">\2</mo>',
    ),
    (re.compile(r"<mo>(&#x0002F;)</mo>"), r'<mo lspace="0" rspace="0">\1</mo>'),
    (
        re.compile(r'<mo(?: stretchy="false")?>(&#x02016;|&#x0007C;)</mo>'),
        r'<mo stretchy="false" lspace="0" rspace="0">\1</mo>',
    ),
    (re.compile(r"<mi>(&#x0039[1-9A-F];|&#x003A[0-9];)"), r'<mi mathvariant="normal">\1'),
]

# Of the alphabets, browsers know the code points alone. (Where Unicode has a gap, none is used.)
ALPHABET = re.compile(r'<(mi|mn) mathvariant="(bold|script)">([A-Z0-9])<')
FIRST = {("mi", "bold"): 0x1D400, ("mi", "script"): 0x1D49C, ("mn", "bold"): 0x1D7CE}


def code_point(found: re.Match[str]) -> str:
    tag, alphabet, letter = found.groups()
    return f"<{tag}>&#x{FIRST[tag, alphabet] + ord(letter) - ord('0' if tag == 'mn' else 'A'):X};<"


# What latex2mathml does not know it passes on as it stands: a \command, an environment's &.
UNKNOWN = re.compile(r"<m[io][^>]*>(\\\w+|&)</m[io]>")


def mathml(latex: str, node: nodes.Node, *, display: bool) -> str:
    latex = latex.replace("{aligned}", "{split}")  # the same layout; only split is known
    if r"\\" in latex and not latex.lstrip().startswith(r"\begin"):
        latex = rf"\begin{{split}}{latex}\end{{split}}"
    latex = BEFORE_FUNCTION.sub(r"\1\,", NAMED_FUNCTION.sub(r"\g<0>\,", latex))
    try:
        result = latex2mathml.converter.convert(latex, display="block" if display else "inline")
        if unknown := UNKNOWN.search(result):
            raise ValueError(f"no MathML for {unknown[1]}")
    except Exception as error:  # each kind of bad input has its own exception
        logger.warning("cannot set %r: %r", latex, error, location=node)
        return ""
    for pattern, replacement in FINISH:
        result = pattern.sub(replacement, result)
    return ALPHABET.sub(code_point, result)


def visit_inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    formula = mathml(node.astext(), node, display=False)
    if mark := node.get("mark"):
        formula = f'<span class="unbroken">{formula}{mark}</span>'
    translator.body.append(formula)
    raise nodes.SkipNode


def visit_display_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    """A formula that scrolls if it is wide, and beside it the number, which does not."""
    if node.parent.get("ids") == node["ids"]:  # the theme's wrapper carries the anchor
        translator.body.append('<div class="formula"><div class="formula-line">')
    else:
        translator.body.append(translator.starttag(node, "div", CLASS="formula"))
        translator.body.append('<div class="formula-line">')
    translator.body.append(mathml(node.astext(), node, display=True))
    translator.body.append("</div>")
    if node.get("number"):
        number = get_node_equation_number(translator, node)
        translator.body.append(
            f'<a class="equation-number" href="#{node["ids"][0]}">({number})</a>'
        )
    translator.body.append("</div>\n")
    raise nodes.SkipNode


def keep_marks_with_formulas(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """A browser may end a line between a formula and the comma after it."""
    for node in list(doctree.findall(nodes.math)):
        after = node.next_node(descend=False, siblings=True)
        if isinstance(after, nodes.Text) and (mark := re.match(r"[,.;:)?]+", after)):
            node["mark"] = mark[0]
            after.parent.replace(after, nodes.Text(after[mark.end() :]))


class EquationCheck(SphinxDirective):
    """Examples that check the equations named by label; the test suite runs them."""

    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        equations = ", ".join(f"{{eq}}`{label}`" for label in self.arguments[0].split())
        lines = [":::{container} check", f"Check of {equations}", "", "```pycon", *self.content]
        return self.parse_text_to_nodes("\n".join([*lines, "```", ":::"]))


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


class CommandOptions(SphinxDirective):
    """The arguments and options of one command, as its ``--help`` has them."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        commands = typer.main.get_command(cli.app).commands
        if self.arguments[0] not in commands:
            raise ExtensionError(f"there is no command {self.arguments[0]!r}")
        command = commands[self.arguments[0]]
        context = typer.Context(command, info_name=self.arguments[0])
        lines = [command.help, "", ":::{list-table}", ":header-rows: 1", ""]
        lines += MetricsTable.row("option", "meaning")
        for parameter in command.params:
            shown = parameter.get_help_record(context)
            if shown is None:  # an old name, kept but not advertised
                continue
            name, meaning = shown
            meaning = meaning.replace(r"\[", "[")  # escaped for the terminal's markup
            meaning = re.sub(r"([*_\\<$`])", r"\\\1", meaning)
            # An option's dashes are no punctuation.
            lines += MetricsTable.row(
                f"`{name}`", re.sub(r"(?<!\w)--[a-z][a-z-]*", r"`\g<0>`", meaning)
            )
        return self.parse_text_to_nodes("\n".join([*lines, ":::"]))


def name_repository(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = source[0].replace("{{ repository }}", repository)


def skip_named_tuple_field(
    app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object
) -> bool | None:
    """Leave out "Alias for field number 0": the Attributes section says what the field is."""
    return True if type(obj).__name__ == "_tuplegetter" else None


# Each recipe is also a notebook: its blocks are run while the site is built, and their outputs are
# written with them. tools/make_recipes.py does what myst-nb and a Jupyter kernel would, without
# either: pages stay readable where they are, and the tests compare them with their outputs.


def write_notebooks(app: Sphinx) -> None:
    if app.builder.name != "html":
        return
    where = Path(__file__).parent.parent / "tools" / "make_recipes.py"
    spec = importlib.util.spec_from_file_location("make_recipes", where)
    recipes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipes)
    for failure in recipes.write_notebooks(Path(app.outdir) / "recipes", recipes.pages()):
        logger.warning("a recipe does not run: %s", failure)


def offer_notebook(app: Sphinx, name: str, source: list[str]) -> None:
    folder, _, recipe = name.partition("/")
    if folder == "recipes" and recipe != "index" and "```pycon" in source[0]:
        source[0] += f'\n<a href="{recipe}.ipynb" download>Download as a notebook</a>\n'


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(visit_inline_math, None),
        block_renderers=(visit_display_math, None),
    )
    app.connect("source-read", name_repository)
    app.connect("source-read", offer_notebook)
    app.connect("builder-inited", write_notebooks)
    app.connect("autodoc-skip-member", skip_named_tuple_field)
    app.connect("doctree-resolved", keep_marks_with_formulas)
    app.add_directive("metrics-table", MetricsTable)
    app.add_directive("check", EquationCheck)
    app.add_directive("command-options", CommandOptions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


html_math_renderer = "mathml"
