"""The pictures can be read: plain numbers, names beside their lines, figures that stand out."""

import itertools
import json
from pathlib import Path

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from mlx_snapkv.reporting.heatmap import readable_on
from mlx_snapkv.reporting.plots import figures

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module", params=["benchmarks", "benchmarks-demo"])
def drawn(request):
    """A result, its two pictures, and what measures their texts."""
    result = json.loads((DOCS / f"{request.param}.json").read_text(encoding="utf-8"))
    pictures = list(figures(result).values())
    for figure in pictures:
        FigureCanvasAgg(figure).draw()
    return result, pictures


def test_numbers_are_plain(drawn):
    result, (speed, memory) = drawn
    told = [label.get_text() for label in speed.axes[0].get_yticklabels()]
    assert len(told) >= 3 and all(float(text.replace(",", "")) > 0 for text in told)
    told = [label.get_text() for label in memory.axes[0].get_yticklabels()]
    assert all(text.endswith((" kB", " MB", " GB")) for text in told)
    for figure in (speed, memory):
        at = [label.get_text() for label in figure.axes[0].get_xticklabels()]
        assert at == [f"{n:,}" for n in sorted({r["context"] for r in result["decode"]})]
        assert not any(t.get_text() for t in figure.axes[0].get_yticklabels(minor=True))


def test_the_title_tells_model_machine_and_runs(drawn):
    result, (speed, memory) = drawn
    for figure, runs in ((speed, "median of 20 steps"), (memory, "one run")):
        title = figure.axes[0].get_title(loc="left")
        assert all(words in title for words in (runs, result["model"], "AMD EPYC, 2 cores, CPU"))


def test_every_line_has_its_name_beside_it_and_looks_like_no_other(drawn):
    for figure in drawn[1]:
        (axes,) = figure.axes
        assert len(axes.lines) == len(axes.texts) == 5
        assert len({(x.get_color(), x.get_linestyle(), x.get_marker()) for x in axes.lines}) == 5
        assert {x.get_color() for x in axes.lines} == {x.get_color() for x in axes.texts}
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        right = axes.get_window_extent().x1
        assert all(right < box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
        # Of lines that lie on each other the narrow, dashed one is drawn last.
        widths = [line.get_linewidth() for line in axes.lines]
        assert widths == sorted(widths, reverse=True)


def test_figures_stand_out_on_every_cell():
    cells = matplotlib.colormaps["RdYlGn"]
    assert [readable_on(cells(share)) for share in (0.0, 0.5, 1.0)] == ["white", "black", "white"]
