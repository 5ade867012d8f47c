"""Explain why a model can't be loaded, from the exception and the model's files."""

import traceback
from pathlib import Path

from ..errors import brief

# Hugging Face hub exceptions, by class name.
HUB_ERRORS = {
    "LocalEntryNotFoundError": "the Hugging Face hub can't be reached, and the local cache does not hold it",
    "GatedRepoError": "the repository is gated: request access on its Hugging Face page, then run `hf auth login`",
    "RepositoryNotFoundError": "the Hugging Face hub has no such repository; for a private one run `hf auth login`",
    "HfHubHTTPError": "the Hugging Face hub failed",
}
# A tokenizer has at least one of these files.
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json"
)  # fmt: skip
# Function in mlx-lm's loader -> problem if it fails. The first entry whose function is in the traceback wins.
LOADING_STEPS = {
    "load_tokenizer": "its tokenizer can't be read",
    "load_adapters": "the adapters don't fit",
    "load_weights": "its weights don't fit its config.json",
    "load_config": "its config.json does not describe such a model",
    "load_model": "its config.json does not describe such a model",
}


def loading_problem(name: str, folder: Path, error: Exception, action: str) -> str:
    """Explain why a model can't be loaded.

    Args:
        name: folder or repository, as typed by the user.
        folder: the model's folder, which need not exist if `name` is a repository.
        error: the loader's exception.
        action: "loaded", or "planned" if only the configuration and weight headers were needed.
    """
    if not folder.exists():
        from mlx_lm.utils import hf_repo_to_path

        for error_class in type(error).__mro__:
            hub_problem = HUB_ERRORS.get(error_class.__name__)
            if hub_problem is not None:
                return f"no such folder, and {hub_problem} ({brief(error)})"
        if action == "planned":
            return f"can't be planned: {brief(error)}"
        folder = hf_repo_to_path(name)
    return f"can't be {action}: {_folder_problem(folder, error)}"


def _folder_problem(folder: Path, error: Exception) -> str:
    """Describe the problem with a model folder: missing files, damaged files, or the step that failed."""
    from safetensors import SafetensorError, safe_open

    weight_files = sorted(folder.glob("model*.safetensors"))
    if not weight_files:
        return "the folder has no weights (model.safetensors, or several model-*.safetensors)"
    for file in weight_files:
        try:
            safe_open(file, "np").keys()  # opening compares the file's length with its header
        except (OSError, SafetensorError):
            return f"{file.name} is damaged or incomplete"
    functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    has_tokenizer = any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)
    if "load_tokenizer" in functions and not has_tokenizer:
        return "the folder has no tokenizer, such as tokenizer.json"
    for function, problem in LOADING_STEPS.items():
        if function in functions:
            return f"{problem}: {brief(error)}"
    return f"mlx-lm can't load it: {brief(error)}"
