"""Load the model named by the user: a folder, a Hugging Face repository or a built-in model."""

import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

from ..demo import MODELS
from ..errors import SnapKVError, brief
from ..paths import path_of
from .command import flag_of
from .loading_errors import loading_problem
from .process import raise_on_interrupt, silence_output

# Maximum fraction of the machine's memory for float32 weights. KV entries, which also become float32, need the rest.
MAX_WEIGHTS_SHARE = 0.5
INDEX = "model.safetensors.index.json"
# Substrings of mlx and mlx-lm error messages about models that can't be split.
SPLIT_ERRORS = ("does not support", "must be positive", "annot shard", "annot be sharded")
WITHOUT_LAUNCH = "start it without mlx.launch"


def load_model(
    name: str,
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
    option: str = "--model",
    quantize_activations: bool = False,
    pipeline: bool | None = None,
):
    """Load the model and tokenizer from a folder, a Hugging Face repository or a built-in model.

    If `mlx.launch` started several processes, each loads its shard, and only rank 0 prints from then on.

    Args:
        name: the folder, repository or built-in model.
        adapter_path: folder of LoRA adapters, if any.
        trust_remote_code: whether the model and the tokenizer may run code from the model folder.
        option: flag that names the model, for messages.
        quantize_activations: whether to quantise activations like the weights.
        pipeline: whether each process loads whole layers instead of a slice of every layer. None for commands that run
            in one process only.

    Raises: SnapKVError: the model or its adapters can't be loaded, or the command or an option does not work with this
        number of processes.
    """
    import mlx.core as mx
    from mlx_lm import load

    from ..engine.wired_memory import hold_memory
    from ..planning.machine import this_machine

    n_ranks = _start_ranks(pipeline)
    require_one_process(adapter_path=adapter_path, quantize_activations=quantize_activations)
    folder = _folder_of(name, option)
    adapter = _adapter_folder(adapter_path)
    # Silence the tokenizer's warning that long texts cause errors. They don't here, and commands print their own
    # warning about long prompts.
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    raise_on_interrupt()
    # `os.path.exists` returns False for invalid file names, where `Path.exists` may raise.
    location = str(folder) if os.path.exists(folder) else name
    options: Any = {
        "tokenizer_config": {"trust_remote_code": trust_remote_code},
        "trust_remote_code": trust_remote_code,
    }
    with _explaining_failures(option, name, folder, "loaded"):
        changes = _rope_changes(location, f"{option} {name}")
        if n_ranks > 1:
            model, tokenizer = _load_shard(location, n_ranks, bool(pipeline), changes, **options)
        else:
            options["model_config"] = {"quantize_activations": quantize_activations, **changes}
            model, tokenizer, *_ = load(location, adapter_path=adapter, **options)
    # Whether a model is converted to float32 depends on the machine's memory, so ranks could disagree. Split models are
    # therefore not converted, except for built-in models, which are converted on any machine without a GPU.
    if n_ranks == 1 or name in MODELS:
        notice = _compute_in_float32(name, model, this_machine().memory)
        if notice is not None:
            print(f"mlx-snapkv: {option} {name}: {notice}", file=sys.stderr)
    mx.eval(model.parameters())
    hold_memory(model)
    return model, tokenizer


@contextlib.contextmanager
def _explaining_failures(option: str, name: str, folder: Path, action: str) -> Iterator[None]:
    """Convert any exception in the `with` block to a SnapKVError that says why the model can't be loaded.

    Args:
        option: flag that names the model, for messages.
        name: the folder, repository or built-in model.
        folder: the model's folder, which need not exist if `name` is a repository.
        action: see `loading_problem`.
    """
    try:
        yield
    except SnapKVError as error:
        raise SnapKVError("{} {}: {}", option, name, error) from error
    except Exception as error:  # damaged files and failed downloads raise errors of many types
        problem = loading_problem(name, folder, error, action)
        raise SnapKVError(f"{option} {name}: {problem}") from error


def _adapter_folder(path: str | None) -> str | None:
    """Return the adapter folder for mlx-lm, or None if `path` is None.

    Raises: SnapKVError: the folder contains no adapters.
    """
    if path is None:
        return None
    folder = path_of(path, "--adapter-path")
    if not (folder / "adapter_config.json").is_file():
        raise SnapKVError(f"--adapter-path {path}: no adapter_config.json there")
    return str(folder)


def _rope_changes(location: str, label: str) -> dict[str, Any]:
    """Return the config.json changes that make mlx-lm use the model's `rope_parameters`.

    Changes, if any, are listed on stderr.

    Args:
        location: the folder or repository name.
        label: prefix of the printed line, such as "--model demo".

    Raises: SnapKVError: mlx-lm does not support a value.
    """
    from mlx_lm.utils import load_config, snapshot_download

    from ..models.rope_parameters import unread_parameters

    is_folder = os.path.exists(location)
    folder = location if is_folder else snapshot_download(location, allow_patterns=["config.json"])
    parameters = unread_parameters(load_config(Path(folder)))
    if parameters.values:
        print(f"mlx-snapkv: {label}: {parameters}", file=sys.stderr)
    return parameters.changes


def _start_ranks(pipeline: bool | None) -> int:
    """Set up this process if `mlx.launch` started it, and return the number of processes.

    Only rank 0 prints, and all ranks share a sampling seed.

    Raises: SnapKVError: there are several processes but the command supports only one, --pipeline is set but there is
        only one process, or the other processes can't be reached.
    """
    import mlx.core as mx

    from ..models.distributed import from_first_rank, n_ranks, rank

    n_processes = n_ranks()
    if rank() != 0:
        silence_output()
    if n_processes == 1 and pipeline:
        raise SnapKVError(
            "--pipeline is for several Macs: start the command with mlx.launch, or drop it"
        )
    supports_several = pipeline is not None
    if n_processes > 1 and not supports_several:
        raise SnapKVError(
            f"mlx-snapkv {sys.argv[1]} does not run on several Macs: {WITHOUT_LAUNCH}"
        )
    if n_processes > 1:  # all ranks must sample the same tokens
        mx.random.seed(from_first_rank(partial(secrets.randbits, 63)))
    return n_processes


def require_one_process(**options: Any) -> None:
    """Raise SnapKVError if there are several processes and any of these options is set."""
    from ..models.distributed import n_ranks

    for name, value in options.items():
        if value and n_ranks() > 1:
            raise SnapKVError(
                f"{flag_of(name)} can't be used on several Macs: drop it, or {WITHOUT_LAUNCH}"
            )


def _load_shard(
    folder: str, n_ranks: int, pipeline: bool, rope_changes: dict[str, Any], **options: Any
) -> tuple[Any, Any]:
    """Load this rank's shard of a model, and the tokenizer.

    Raises: SnapKVError: the model can't be split, it has no index file although --pipeline is set, or it needs
        `rope_changes`, which `sharded_load` does not support.
    """
    import mlx.core as mx
    from mlx_lm.utils import sharded_load

    if rope_changes:
        raise SnapKVError(
            "on several Macs mlx-lm does not read rope_parameters: add rope_theta to config.json, or "
            f"{WITHOUT_LAUNCH}"
        )
    group_name = "pipeline_group" if pipeline else "tensor_group"
    options[group_name] = mx.distributed.init()
    try:
        model, tokenizer = sharded_load(folder, **options)
    except FileNotFoundError as error:
        if not str(error.filename).endswith(INDEX):
            raise
        raise SnapKVError(
            f"--pipeline needs {INDEX}, which lists the layers' files: make it with mlx_lm.convert, or drop --pipeline"
        ) from error
    except ValueError as error:
        if not any(reason in str(error) for reason in SPLIT_ERRORS):
            raise
        change = "drop" if pipeline else "add"
        raise SnapKVError(
            f"mlx-lm can't split this model ({brief(error)}): {change} --pipeline, or start fewer processes"
        ) from error
    if not pipeline:
        _require_divisible_heads(model, n_ranks)
    return model, tokenizer


def _require_divisible_heads(model: Any, n_ranks: int) -> None:
    """Check that the model's KV heads can be split evenly among the ranks. Raises: SnapKVError."""
    args = getattr(model, "args", None)
    text_config = getattr(args, "text_config", None) or {}
    n_heads = getattr(args, "num_key_value_heads", None) or text_config.get("num_key_value_heads")
    if n_heads and n_heads % n_ranks:
        raise SnapKVError(
            f"{n_heads} KV heads can't be split over {n_ranks} processes: start a number that divides {n_heads}, "
            "or add --pipeline"
        )


def load_without_weights(name: str, for_mac: bool = False):
    """Build a model with placeholder weights from its configuration and weight headers.

    Nothing else is downloaded from a Hugging Face repository.

    Args:
        name: the folder, repository or built-in model.
        for_mac: whether to keep half precision, as on a Mac, even if this machine has no GPU. Built-in models are
            converted to float32 anyway.

    Raises: SnapKVError: the model does not exist, or mlx-lm can't load it.
    """
    folder = _folder_of(name, "--model")  # reports mistakes before the slow imports
    from mlx_lm.utils import hf_repo_to_path

    from ..planning.machine import this_machine
    from ..planning.shapes import repository_without_weights, without_weights

    if not os.path.exists(folder):
        # If the repository is not in the local cache, `repository_without_weights` looks it up on the hub.
        with contextlib.suppress(Exception):
            folder = hf_repo_to_path(name)
    with _explaining_failures("--model", name, folder, "planned"):
        is_folder = os.path.exists(folder)
        model = without_weights(folder) if is_folder else repository_without_weights(name)
    if name in MODELS or not for_mac:
        _compute_in_float32(name, model, this_machine().memory)
    return model


def _folder_of(name: str, option: str) -> Path:
    """Return the model's folder. If `name` is a repository name, the folder need not exist.

    Raises: SnapKVError: the folder has no config.json, or it does not exist and `name` is not a repository name.
    """
    folder = MODELS.get(name) or path_of(name, option)
    if os.path.exists(folder):
        if not (folder / "config.json").is_file():
            raise SnapKVError(f"{option} {name}: not a model folder, since it has no config.json")
        return folder
    if not _is_repository_name(name):
        raise SnapKVError(
            f"{option} {name}: no such folder, and not a valid Hugging Face repository name; "
            f"built-in models: {', '.join(MODELS)}"
        )
    return folder


def _is_repository_name(name: str) -> bool:
    """Check whether a name is a valid Hugging Face repository name with an owner."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name  # a name without an owner must be a mistyped folder


def _compute_in_float32(name: str, model: Any, memory: int) -> str | None:
    """Convert half-precision weights to float32 on a machine without a GPU.

    On a CPU, MLX emulates half precision, which is several times slower than float32. Weights that would take more than
    `MAX_WEIGHTS_SHARE` of the memory in float32 are not converted, unless the model is built in. Return a notice about
    the conversion or about slow half precision, or None if neither applies or the model is built in.

    Args:
        name: model name as typed by the user.
        model: an mlx-lm model, converted in place.
        memory: the machine's total memory in bytes. Don't pass its free memory, which changes from run to run: answers
            would change with it, and saved prompts would no longer fit the model.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from ..planning.units import format_bytes

    weights = [array for _, array in cast(list, tree_flatten(model.parameters()))]
    half_weights = [array for array in weights if array.dtype in (mx.float16, mx.bfloat16)]
    has_gpu = mx.default_device() != mx.Device(mx.cpu)
    if not half_weights or has_gpu:
        return None
    n_bytes = sum(array.nbytes for array in weights)
    n_added_bytes = sum(array.nbytes for array in half_weights)  # their size doubles
    n_float32_bytes = n_bytes + n_added_bytes
    dtype = str(half_weights[0].dtype).removeprefix("mlx.core.")
    sizes = f"{format_bytes(n_float32_bytes)} of {format_bytes(memory)}"
    is_embedded = name in MODELS
    if not is_embedded and n_float32_bytes > memory * MAX_WEIGHTS_SHARE:
        return f"{dtype} is slow without a GPU, and in float32 the weights would take {sizes}"
    model.set_dtype(mx.float32)
    if is_embedded:
        return None
    return f"computing in float32, faster than {dtype} without a GPU; the weights take {sizes}"
