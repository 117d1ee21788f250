"""Static figures beside the heat map."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from acutance import probe
from acutance.probing import HeadSummary
from acutance.report.figures import CHARTS, draw
from acutance.report.plot_style import DARK
from acutance.summary.cells import Parts

Make = Callable[..., HeadSummary]


@pytest.fixture(scope="module")
def probed() -> HeadSummary:
    """Two causal layers, whose rows see 1 to 40 keys."""
    torch.manual_seed(0)
    model = torch.nn.ModuleList(torch.nn.MultiheadAttention(16, 4, batch_first=True) for _ in "ab")
    mask = torch.nn.Transformer.generate_square_subsequent_mask(40)
    with probe(model) as opened:
        for layer in model:
            layer.eval()(*[torch.randn(3, 40, 16)] * 3, attn_mask=mask, is_causal=True)
    return opened.summary({"model": r"a$\frac{$ model"})


@pytest.mark.few(2)
@pytest.mark.parametrize("chart", CHARTS)
def test_every_chart_is_drawn_light_and_dark(
    probed: HeadSummary, tmp_path: Path, chart: str
) -> None:
    draw(probed, tmp_path / "light.png", chart=chart)
    draw(probed, tmp_path / "again.png", chart=chart)
    assert (tmp_path / "light.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "light.png").read_bytes() == (tmp_path / "again.png").read_bytes()
    draw(probed, tmp_path / "dark.svg", chart=chart, dark=True)
    svg = (tmp_path / "dark.svg").read_text(encoding="utf-8")
    assert "<svg" in svg
    assert DARK.page in svg


@pytest.mark.parametrize("chart", ["heads", "layers", "lengths"])
@pytest.mark.parametrize("metric", ["effective_keys", "max_logit"])
def test_charts_show_other_metrics(
    probed: HeadSummary, tmp_path: Path, chart: str, metric: str
) -> None:
    draw(probed, tmp_path / "x.png", chart=chart, metric=metric)
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_gaps_and_many_heads_are_drawn(summary_of: Make, tmp_path: Path) -> None:
    gaps = {name: {(0, 0): math.nan} for name in ("entropy", "normalized_entropy")}
    summary = summary_of((2, 0, 33), **gaps)
    for chart in ("heads", "layers", "theory"):
        draw(summary, tmp_path / f"{chart}.png", chart=chart)
    many = summary_of((64,) * 30, rows=2, metrics=("entropy", "normalized_entropy"))
    draw(many, tmp_path / "many.png", chart="layers")
    assert len(list(tmp_path.iterdir())) == 4


def test_a_model_that_looks_both_ways_is_drawn_at_its_one_length(tmp_path: Path) -> None:
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with probe(layer) as opened:
        layer(*[torch.randn(2, 24, 8)] * 3)
    draw(opened.summary(), tmp_path / "x.png", chart="lengths")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_what_cannot_be_drawn_is_said(
    probed: HeadSummary, summary_of: Make, tmp_path: Path
) -> None:
    target = tmp_path / "x.png"
    with pytest.raises(
        ValueError, match="chart: must be one of heads, layers, lengths, theory, got 'pie'"
    ):
        draw(probed, target, chart="pie")
    with pytest.raises(ValueError, match="'theory' shows entropy only and accepts no other metric"):
        draw(probed, target, chart="theory", metric="lse")
    with pytest.raises(ValueError, match="does not record how metrics depend on n"):
        draw(replace(probed, optional_parts=Parts()), target, chart="lengths")
    with pytest.raises(ValueError, match="did you mean 'entropy'"):
        draw(probed, target, chart="layers", metric="entropie")
    with pytest.raises(ValueError, match="'gaussian_entropy' was not recorded"):
        draw(summary_of(metrics=("entropy",)), target, chart="theory")
    nothing = summary_of((1,), metrics=("entropy",), entropy={(0, 0): math.nan})
    for chart in ("layers",):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw(nothing, target, chart=chart, metric="entropy")
    assert not target.exists()


@pytest.mark.parametrize("chart", CHARTS)
def test_without_matplotlib_it_says_how_to_get_it(
    probed: HeadSummary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chart: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'install it with: pip install "matplotlib<'):
        draw(probed, tmp_path / "x.png", chart=chart)


def test_the_former_module_has_the_same_names() -> None:
    from acutance.report import charts, figures

    assert charts.CHARTS is figures.CHARTS
    assert charts.draw is figures.draw
