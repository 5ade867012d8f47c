"""What a report calls its figures."""

from mlx_snapkv.engine.report import CompressionReport


def test_earlier_names():
    report = CompressionReport("snapkv", 100, entries_kept=[8, None], attention_share=[0.5, None])
    assert report.rows == report.entries == 8
    assert report.rows_kept == [8, None] and report.mass_kept == [0.5, None]
