"""The supported and the refused model types, as `mlx-snapkv models` and the docs show them."""

from mlx_lm.utils import MODEL_REMAPPING

from . import table

PAGE = """# Model types

{n_supported} model types of mlx-lm can be compressed, and {n_refused} are refused by name. \
Each of the first is run by the conformance test (`tests/models/test_conformance.py`) as a tiny random model: \
the recorded queries are bit for bit those of its attention call, the votes are those of its softmax, \
and decoding with everything kept equals mlx-lm's.

This page is written by `python scripts/write_docs.py`; `mlx-snapkv models` prints the same.

## Supported

{supported}

## Refused

{refused}
"""


def supported() -> list[tuple[str, str, str]]:
    """Model type, the other `model_type`s that mlx-lm loads with it, and a note."""
    return [
        (name, _aliases(name), "; ".join(filter(None, dict.fromkeys(f.note for f in families))))
        for name, families in table.SUPPORTED.items()
    ]


def refused() -> list[tuple[str, str, str]]:
    """Model type, the other `model_type`s that mlx-lm loads with it, and why it can't be compressed."""
    return [(name, _aliases(name), reason) for name, reason in sorted(table.REFUSED.items())]


def markdown() -> str:
    """Both lists as a page of the docs."""
    return PAGE.format(
        n_supported=len(table.SUPPORTED),
        n_refused=len(table.REFUSED),
        supported=_table(("model type", "also loads", "note"), supported()),
        refused=_table(("model type", "also loads", "why"), refused()),
    )


def _aliases(name: str) -> str:
    return ", ".join(sorted(alias for alias, target in MODEL_REMAPPING.items() if target == name))


def _table(header: tuple[str, ...], rows: list[tuple[str, str, str]]) -> str:
    ruled = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in ruled)
