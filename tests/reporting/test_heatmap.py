import matplotlib

from mlx_snapkv.reporting.heatmap import readable_on


def test_figures_stand_out_on_every_cell():
    cells = matplotlib.colormaps["RdYlGn"]
    assert [readable_on(cells(share)) for share in (0.0, 0.5, 1.0)] == ["white", "black", "white"]
