"""`mlx-snapkv doctor`: print the facts about this machine that a bug report needs."""

from __future__ import annotations

import json
from typing import Annotated

from typer import Option

from ..demo import MODELS
from .options import AsJson


def doctor(
    *,
    model: Annotated[
        str | None,
        Option(
            help=f"Model whose attention and speed to look at: folder, Hugging Face repository, or {', '.join(MODELS)}."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    r"""Print what a bug report needs: machine, memory, versions, MLX's backend, free disk space and sparse attention.

    No weights are loaded.

    \b
      mlx-snapkv doctor
      mlx-snapkv doctor --model MODEL
    """
    from ..measure.environment import as_table, diagnosis
    from ..measure.layer_speed import sparse_pays
    from .loading import load_without_weights
    from .terminal_table import print_table

    name = model or "demo"
    loaded_model = load_without_weights(name)
    report = diagnosis(None if model is None else loaded_model, model)
    report[f"speed of {name}"] = str(sparse_pays(loaded_model))
    if as_json:
        print(json.dumps(report))
    else:
        print_table(as_table(report))
