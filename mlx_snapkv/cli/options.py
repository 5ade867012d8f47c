"""The options that several commands share, each declared once: alone, or in groups for `with_options`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args, get_type_hints

from typer import Option

from ..demo import MODELS
from ..errors import SnapKVError, UnknownOptionError, suggestion

MOST = 10_000_000  # tokens of a prompt
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

Model = Annotated[
    str, Option(help=f"Model folder, Hugging Face repository, or: {', '.join(MODELS)}.")
]
SystemPrompt = Annotated[str | None, Option(help="System message of the chat template.")]
IgnoreChatTemplate = Annotated[
    bool, Option("--ignore-chat-template", help="Give the prompt as raw text.")
]
ChatTemplateConfig = Annotated[
    str | None, Option(help="Options of the chat template, as a JSON object.", metavar="JSON")
]
MaxTokens = Annotated[
    int, Option("--max-tokens", "-m", min=1, help="Tokens of an answer, at most.")
]
Seed = Annotated[int | None, Option(min=0, max=2**64 - 1, help="Seed of the sampling.")]
Concurrency = Annotated[int, Option(min=1, max=1024, help="Requests at once, at most.")]
MaxKVBytes = Annotated[
    str | None,
    Option(metavar="SIZE", help="KV memory, such as 4GB, that requests wait rather than exceed."),
]
Facts = Annotated[int, Option(min=1, max=32, help="Facts to hide and ask for.")]
DocumentSeed = Annotated[int, Option(help="Seed of the documents.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="No progress and no figures on stderr.")]
AsJson = Annotated[bool, Option("--json", help="One JSON object on stdout.")]


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    model: Model
    adapter_path: Annotated[str | None, Option(help="Folder of LoRA adapters.")] = None
    quantize_activations: Annotated[
        bool,
        Option(
            "--quantize-activations",
            "-qa",
            help="Quantise activations as their layers' weights are.",
        ),
    ] = False
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Allow a tokenizer's own code.")
    ] = False

    def load(self) -> tuple[Any, Any]:
        """The model and its tokenizer; see `load_model`."""
        from .loading import load_model

        return load_model(self.model, **{k: v for k, v in vars(self).items() if k != "model"})


@dataclass(frozen=True)
class ShardedModelOptions(ModelOptions):
    """The same for a command that several Macs can run."""

    pipeline: Annotated[
        bool,
        Option(
            "--pipeline",
            help="On several Macs, started by mlx.launch: each has some of the layers, instead of a slice of each.",
        ),
    ] = False


@dataclass(frozen=True)
class DraftOptions:
    """A draft model."""

    draft_model: Annotated[
        str | None, Option(help="Small model of the same tokenizer that proposes tokens.")
    ] = None
    num_draft_tokens: Annotated[
        int, Option(min=1, help="Tokens that the draft model proposes at a time.")
    ] = 3

    def load(self, tokenizer: Any, trust_remote_code: bool) -> dict[str, Any]:
        """What `stream_generate` is to know of a draft model; see `load_draft_model`."""
        from .loading import load_draft_model

        if self.draft_model is None:
            return {}
        model = load_draft_model(self.draft_model, tokenizer, trust_remote_code)
        return {"draft_model": model, "num_draft_tokens": self.num_draft_tokens}


@dataclass(frozen=True)
class TextOptions:
    """A text to read."""

    prompt: Annotated[str | None, Option("--prompt", "-p", help="Text, or - for stdin.")] = None
    prompt_file: Annotated[
        str | None, Option(help="Text file to read; a --prompt is put after it.")
    ] = None
    system_prompt: SystemPrompt = None

    def read(self) -> str:
        """The file's text, then the prompt's; see `read_prompt`."""
        from .prompts import read_prompt

        return read_prompt(self.prompt, self.prompt_file)


@dataclass(frozen=True)
class PromptOptions(TextOptions):
    """A text to answer."""

    prefill_response: Annotated[str | None, Option(help="What the answer is to begin with.")] = None
    ignore_chat_template: IgnoreChatTemplate = False

    def encode(self, tokenizer: Any, text: str) -> list[int]:
        """Token ids of a prompt with this text; see `prompts.encode`."""
        from .prompts import encode

        ending: Any = {"prefill_response": self.prefill_response}
        return encode(tokenizer, text, self.system_prompt, self.ignore_chat_template, **ending)


@dataclass(frozen=True)
class TokenizerOptions:
    """What a tokenizer is to do besides."""

    chat_template_config: ChatTemplateConfig = None
    extra_eos_token: Annotated[
        list[str] | None,
        Option(help="Token that also ends an answer; repeat it for several."),
    ] = None

    def adapt(self, tokenizer: Any) -> None:
        """Tell the tokenizer; see `adapt_tokenizer`."""
        from .prompts import adapt_tokenizer

        adapt_tokenizer(tokenizer, self.extra_eos_token, self.chat_template_config)


@dataclass(frozen=True)
class SamplingOptions:
    """How an answer's tokens are chosen, and how many at most."""

    temp: Annotated[float, Option(min=0, max=100, help="Sampling temperature; 0 is greedy.")] = 0.0
    top_p: Annotated[float, Option(min=0, max=1, help="Sampling top-p; 1 is off.")] = 1.0
    min_p: Annotated[float, Option(min=0, max=1, help="Sampling min-p; 0 is off.")] = 0.0
    top_k: Annotated[int, Option(min=0, help="Sampling top-k; 0 is off.")] = 0
    min_tokens_to_keep: Annotated[int, Option(min=1, help="Tokens that min-p keeps at least.")] = 1
    xtc_probability: Annotated[float, Option(min=0, max=1, help="XTC probability.")] = 0.0
    xtc_threshold: Annotated[float, Option(min=0, max=0.5, help="XTC threshold.")] = 0.1
    max_tokens: MaxTokens = 256

    def changed(self, name: str, text: str) -> SamplingOptions:
        """The same with another value of one setting, as a chat's /set takes it.

        Raises:
            SnapKVError: there is no such setting, or its flag would not take that value.
        """
        settings = get_type_hints(type(self), include_extras=True)
        name = name.lstrip("-").replace("-", "_")
        if name not in settings:
            close = suggestion(name, settings)
            known = ", ".join(f"/set {setting}" for setting in settings)
            raise UnknownOptionError(f"unknown setting {name}{close}: one of {known}")
        kind, option = get_args(settings[name])
        low, high = option.min, float("inf") if option.max is None else option.max
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high or value == float("inf"):
            bounds = f"from {low}" if option.max is None else f"from {low} to {high}"
            number = "a whole number" if kind is int else "a number"
            raise SnapKVError(f"/set {name} must be {number} {bounds}, got {text!r}")
        return replace(self, **{name: value})

    def generation(self, tokenizer: Any) -> dict[str, Any]:
        """The same as options of mlx-lm's `stream_generate`; SnapKVError if one is beyond the vocabulary."""
        from mlx_lm.sample_utils import make_sampler

        options, size = dict(vars(self)), len(tokenizer)
        for name in ("top_k", "min_tokens_to_keep"):
            if options[name] >= size:
                flag = f"--{name.replace('_', '-')}"
                raise SnapKVError(
                    f"{flag} must be below the vocabulary's {size}, got {options[name]}"
                )
        special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
        max_tokens = options.pop("max_tokens")
        return {
            "max_tokens": max_tokens,
            "sampler": make_sampler(xtc_special_tokens=special, **options),
        }


def seed_sampling(seed: int | None) -> None:
    import mlx.core as mx

    if seed is not None:
        mx.random.seed(seed)


def whole_numbers(option: str, text: str, least: int) -> list[int]:
    """Whole numbers from a comma-separated list; empty for an empty one."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if any(not least <= n <= MOST for n in numbers):
        raise SnapKVError(
            f"{option} must be whole numbers from {least} to {MOST}, with commas, got {text!r}"
        )
    return numbers


def n_bytes(option: str, text: str, least: int = 1) -> int:
    """At least so many bytes, from a number and, if there is one, a decimal unit: "500MB", "4 GB", "1.5e9"."""
    number, unit = text.strip().lower().removesuffix("b"), 1.0
    if number[-1:] in UNITS:
        number, unit = number[:-1], UNITS[number[-1]]
    try:
        found = float(number) * unit
    except ValueError:
        found = 0.0
    if not least <= found < 2**63:
        bounds = f" from {least:,}" if least > 1 else ""
        raise SnapKVError(
            f"{option} must be a number of bytes{bounds}, such as 500MB or 4GB, got {text!r}"
        )
    return int(found)


def n_tokens(option: str, text: str) -> int:
    """Tokens from a number and, if there is one, a unit of 1,024s: "4096", "128k", "1M"."""
    number, unit = text.strip().lower(), 1
    if number[-1:] in ("k", "m"):
        number, unit = number[:-1], 1 << (10 if number[-1] == "k" else 20)
    try:
        found = int(float(number) * unit)
    except (ValueError, OverflowError):
        found = 0
    if not 1 <= found <= MOST:
        raise SnapKVError(
            f"{option} must be a number of tokens from 1 to {MOST}, such as 4096, 128k or 1M, got {text!r}"
        )
    return found


def tokens_text(n: int) -> str:
    """A number of tokens as it may be typed: 131,072 is "128k"."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return str(n)
