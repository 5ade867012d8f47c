"""Models from what a user typed."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from ..demo import MODELS
from ..errors import SnapKVError, brief
from ..paths import path_of
from .process import listen


def load_model(
    name: str,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    option: str = "--model",
    quantize_activations: bool = False,
    pipeline: bool | None = None,
):
    """The model and tokenizer that mlx-lm loads for a folder, a hub repository or an embedded model's name.

    Of several processes that `mlx.launch` has started, each loads its shard; those but rank 0 print no more.

    Args:
        pipeline: each is to have some of the layers, not a slice of all; None is a command for one process.

    Raises:
        SnapKVError: nothing is there, or mlx-lm can't read it; the message says what was looked for.
    """
    from .sharded import join, load_shared

    ranks = join(pipeline, adapter_path=adapter_path, quantize_activations=quantize_activations)
    folder = _place(name, option)
    adapter = None if adapter_path is None else path_of(adapter_path, "--adapter-path")
    if adapter is not None and not (adapter / "adapter_config.json").is_file():
        raise SnapKVError(f"--adapter-path {adapter_path}: no adapter_config.json there")
    # Of prompts beyond the model's length it says that they fail, which those of our policies don't.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    listen()
    where = str(folder) if os.path.exists(folder) else name  # which no file may be able to have
    try:
        if ranks.size > 1:
            model, tokenizer = load_shared(where, ranks, bool(pipeline), trust_remote_code)
        else:
            from mlx_lm import load

            model, tokenizer, *_ = load(
                where,
                adapter_path=None if adapter is None else str(adapter),
                model_config={"quantize_activations": quantize_activations},
                tokenizer_config={"trust_remote_code": trust_remote_code},
                trust_remote_code=trust_remote_code,
            )
    except SnapKVError as error:
        raise SnapKVError(f"{option} {name}: {error}") from error
    except Exception as error:  # whatever is wrong with the files, it is theirs to mend
        raise SnapKVError(f"{option} {name}: {_why(name, folder, error)}") from error
    _make_fast(name, model)
    return model, tokenizer


def load_without_weights(name: str):
    """The same model, built from its configuration and the headers of its weights' files; of the hub, only these.

    Raises:
        SnapKVError: nothing is there, or mlx-lm can't read it; the message says what was looked for.
    """
    folder = _place(name, "--model")
    from mlx_lm.utils import hf_repo_to_path

    from ..planning.weightless import repository_without_weights, without_weights

    if not os.path.exists(folder):
        with contextlib.suppress(Exception):  # it is asked for below, if it is not here
            folder = hf_repo_to_path(name)
    there = os.path.exists(folder)
    try:
        model = without_weights(folder) if there else repository_without_weights(name)
    except Exception as error:  # as above
        raise SnapKVError(f"--model {name}: {_why_not_planned(name, folder, error)}") from error
    _make_fast(name, model)
    return model


def _place(name: str, option: str) -> Path:
    """The folder that a name stands for; if it is not there, the name may be that of a repository.

    Raises:
        SnapKVError: it is neither.
    """
    folder = MODELS.get(name) or path_of(name, option)
    exists = os.path.exists(folder)
    if exists and not (folder / "config.json").is_file():
        raise SnapKVError(f"{option} {name}: no config.json there, so it is not a model folder")
    if not exists and not _may_be_repository(name):
        raise SnapKVError(
            f"{option} {name}: no such folder, and not the name of a Hugging Face repository; "
            f"embedded models: {', '.join(MODELS)}"
        )
    return folder


def _make_fast(name: str, model) -> None:
    import mlx.core as mx

    if name in MODELS and mx.default_device() == mx.Device(mx.cpu):
        model.set_dtype(mx.float32)  # CPUs only emulate float16, several times slower


def load_draft_model(name: str, tokenizer, trust_remote_code: bool):
    """The draft model, which must have the vocabulary of the main model's tokenizer.

    Raises:
        SnapKVError: it can't be loaded, or the vocabularies differ in size.
    """
    model, its_own = load_model(name, None, trust_remote_code, option="--draft-model")
    if its_own.vocab_size != tokenizer.vocab_size:
        raise SnapKVError(
            f"--draft-model {name}: its tokenizer has {its_own.vocab_size} tokens and the model's "
            f"{tokenizer.vocab_size}; a draft model needs the model's own tokenizer"
        )
    return model


def _may_be_repository(name: str) -> bool:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _why_not_planned(name: str, folder: Path, error: Exception) -> str:
    """Why a model can't be built without its weights."""
    from . import load_errors

    if folder.exists():
        return f"can't be planned: {load_errors.of_files(folder, error)}"
    return load_errors.of_repository(name, error) or f"can't be planned: {brief(error)}"


def _why(name: str, folder: Path, error: Exception) -> str:
    from mlx_lm.utils import hf_repo_to_path

    from . import load_errors

    if not folder.exists():
        problem = load_errors.of_repository(name, error)
        if problem is not None:
            return problem
        folder = hf_repo_to_path(name)
    return f"can't be loaded: {load_errors.of_files(folder, error)}"
