"""The options that several commands share, each declared once: alone, or in groups for `with_options`."""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from typer import BadParameter, Context, Option

from ..demo import MODELS
from ..errors import OptionError, SnapKVError, UnknownOptionError, suggestion
from .command import refusal

MAX_PROMPT_TOKENS = 10_000_000  # tokens of a prompt
BYTES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
TOKENS = {"k": 1 << 10, "m": 1 << 20}
# Parameters of `apply_chat_template` that --chat-template-config may set.
TEMPLATE_OPTIONS = {"tools", "documents", "chat_template"}


def n_bytes(text: Any, least: int = 1) -> int:
    """Return bytes, `least` or more, from a number with or without a decimal unit: "500MB", "4 GB", "1.5e9"."""
    bounds = f" from {least:,}" if least > 1 else ""
    what = f"a number of bytes{bounds}, such as 500MB or 4GB"
    return _number(str(text).strip().lower().removesuffix("b"), BYTES, least, 2**62, what)


def n_tokens(text: Any) -> int:
    """Tokens from a number and, if there is one, a unit of 1,024s: "4096", "128k", "1M"."""
    what = f"a number of tokens from 1 to {MAX_PROMPT_TOKENS}, such as 4096, 128k or 1M"
    return _number(str(text).strip().lower(), TOKENS, 1, MAX_PROMPT_TOKENS, what)


def _number(number: str, units: dict[str, Any], least: int, most: int, what: str) -> int:
    unit = units.get(number[-1:])
    with contextlib.suppress(ValueError, OverflowError):
        value = int(float(number[:-1] if unit else number) * (unit or 1))
        if least <= value <= most:
            return value
    raise BadParameter(f"must be {what}")


def tokens_text(n: int) -> str:
    """A number of tokens as it may be typed: 131,072 is "128k"."""
    for unit, size in reversed(TOKENS.items()):
        if n >= size and n % size == 0:
            return f"{n // size}{unit.replace('m', 'M')}"
    return str(n)


def lengths(least: int) -> Callable[[Any], list[int]]:
    """A parser of whole numbers with commas, each once."""

    def parse(text: Any) -> list[int]:
        with contextlib.suppress(ValueError):
            numbers = [int(part) for part in str(text).split(",") if part.strip()]
            if all(least <= n <= MAX_PROMPT_TOKENS for n in numbers):
                return list(dict.fromkeys(numbers))
        raise BadParameter(
            f"must be whole numbers from {least} to {MAX_PROMPT_TOKENS}, separated by commas"
        )

    return parse


def one_of(*values: Any) -> Callable[[Any], Any]:
    """A parser of one of these values, in capitals or small letters."""
    *most, last = map(str, values)
    by_text = {str(value).lower(): value for value in values}

    def parse(text: Any) -> Any:
        if str(text).lower() not in by_text:
            raise BadParameter(f"must be {', '.join(most)} or {last}")
        return by_text[str(text).lower()]

    return parse


def json_object(text: Any) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(value := json.loads(str(text)), dict):
            return value
    raise BadParameter("must be a JSON object, such as '{\"enable_thinking\": false}'")


Model = Annotated[
    str, Option(help=f"Model folder, Hugging Face repository, or: {', '.join(MODELS)}.")
]
IgnoreChatTemplate = Annotated[
    bool, Option("--ignore-chat-template", help="Use the prompt as raw text.")
]
ChatTemplateConfig = Annotated[
    Any, Option(parser=json_object, help="Options for the chat template.", metavar="JSON")
]
SystemPrompt = Annotated[str | None, Option(help="System message for the chat template.")]
MaxTokens = Annotated[
    int, Option("--max-tokens", "-m", min=1, help="Maximum number of answer tokens.")
]
Seed = Annotated[int | None, Option(min=0, max=2**64 - 1, help="Sampling seed.")]
Facts = Annotated[int, Option(min=1, max=32, help="Number of facts to hide and ask for.")]
DocumentSeed = Annotated[int, Option(help="Seed of the documents.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print no progress or figures on stderr.")]
AsJson = Annotated[bool, Option("--json", help="Print one JSON object on stdout.")]


@dataclass(frozen=True)
class ModelOptions:
    model: Model
    adapter_path: Annotated[str | None, Option(help="Folder of LoRA adapters.")] = None
    quantize_activations: Annotated[
        bool,
        Option("--quantize-activations", "-qa", help="Quantise activations as the weights are."),
    ] = False
    trust_remote_code: Annotated[bool, Option(help="Let the tokenizer run its own code.")] = False

    def load(self) -> tuple[Any, Any]:
        """The model and its tokenizer. Raises: SnapKVError: see `load_model`."""
        from .loading import load_model

        return load_model(
            self.model,
            self.adapter_path,
            self.trust_remote_code,
            quantize_activations=self.quantize_activations,
            pipeline=self.splits_layers,
        )

    @property
    def splits_layers(self) -> bool | None:
        """Whether several Macs have some of the layers each; None is a command for one process."""
        return None


@dataclass(frozen=True)
class TalkingModelOptions(ModelOptions):
    """The same, with options for its tokenizer."""

    chat_template_config: ChatTemplateConfig = None
    extra_eos_token: Annotated[
        list[str] | None, Option(help="Another token that ends answers; repeatable.")
    ] = None

    def load(self) -> tuple[Any, Any]:
        model, tokenizer = super().load()
        adapt_tokenizer(tokenizer, self.extra_eos_token, self.chat_template_config)
        return model, tokenizer


@dataclass(frozen=True)
class ShardedModelOptions(TalkingModelOptions):
    """The same for a command that several Macs can run."""

    pipeline: Annotated[
        bool,
        Option(
            help="On several Macs (mlx.launch), give each Mac whole layers instead of a slice of every layer."
        ),
    ] = False

    @property
    def splits_layers(self) -> bool:
        return self.pipeline


@dataclass(frozen=True)
class DraftOptions:
    draft_model: Annotated[
        str | None, Option(help="Small model with the same tokenizer that drafts tokens.")
    ] = None
    num_draft_tokens: Annotated[
        int, Option(min=1, help="Tokens that the draft model drafts at a time.")
    ] = 3

    def load(self, tokenizer: Any, trust_remote_code: bool) -> dict[str, Any]:
        """The draft model as keywords of `stream_generate`; SnapKVError if its tokenizer is another."""
        from .loading import load_model

        name = self.draft_model
        if name is None:
            return {}
        model, its_own = load_model(name, None, trust_remote_code, option="--draft-model")
        if its_own.vocab_size != tokenizer.vocab_size:
            raise SnapKVError(
                f"--draft-model {name}: its tokenizer has {its_own.vocab_size} tokens, but the model's has "
                f"{tokenizer.vocab_size}; a draft model needs the model's own tokenizer"
            )
        return {"draft_model": model, "num_draft_tokens": self.num_draft_tokens}


@dataclass(frozen=True)
class ShownOptions:
    quiet: Quiet = False
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class TogetherOptions:
    """For requests that are answered together."""

    concurrency: Annotated[
        int, Option(min=1, max=1024, help="Maximum number of requests at once.")
    ] = 8
    max_kv_bytes: Annotated[
        int | None,
        Option(
            parser=n_bytes,
            metavar="SIZE",
            help="KV memory limit, such as 4GB; a request waits until it fits.",
        ),
    ] = None


@dataclass(frozen=True)
class SamplingOptions:
    temp: Annotated[float, Option(min=0, max=100, help="Sampling temperature; 0 is greedy.")] = 0.0
    top_p: Annotated[float, Option(min=0, max=1, help="Sampling top-p; 1 turns it off.")] = 1.0
    min_p: Annotated[float, Option(min=0, max=1, help="Sampling min-p; 0 turns it off.")] = 0.0
    top_k: Annotated[int, Option(min=0, help="Sampling top-k; 0 turns it off.")] = 0
    min_tokens_to_keep: Annotated[
        int, Option(min=1, help="Minimum number of tokens that min-p keeps.")
    ] = 1
    xtc_probability: Annotated[float, Option(min=0, max=1, help="XTC probability.")] = 0.0
    xtc_threshold: Annotated[float, Option(min=0, max=0.5, help="XTC threshold.")] = 0.1
    max_tokens: MaxTokens = 256

    def changed(self, name: str, text: str, context: Context) -> "SamplingOptions":
        """Return these options with another value of one. Raises: SnapKVError: its flag would not take the value."""
        name, settings = name.lstrip("-").replace("-", "_"), vars(self)
        if name not in settings:
            meant = (
                f"{suggestion(name, settings)}: one of {', '.join(f'/set {x}' for x in settings)}"
            )
            raise UnknownOptionError(f"unknown setting {name}{meant}")
        (flag,) = [option for option in context.command.params if option.name == name]
        try:
            return replace(self, **{name: flag.process_value(context, text)})
        except BadParameter as error:
            raise SnapKVError(refusal(f"/set {name}", flag, text, error)) from error

    def generation(self, tokenizer: Any) -> dict[str, Any]:
        """Return options of mlx-lm's `stream_generate`. Raises: SnapKVError: one is beyond the vocabulary."""
        from mlx_lm.sample_utils import make_sampler

        options, size = dict(vars(self)), len(tokenizer)
        for name in ("top_k", "min_tokens_to_keep"):
            if options[name] >= size:
                raise OptionError(name, f"less than the vocabulary's {size}", options[name])
        max_tokens = options.pop("max_tokens")
        special = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
        sampler = make_sampler(xtc_special_tokens=special, **options)
        return {"max_tokens": max_tokens, "sampler": sampler}


def adapt_tokenizer(
    tokenizer, extra_eos_token: Sequence[str] | None, template_options: dict[str, Any] | None
) -> None:
    """Add tokens that end an answer, and options for the chat template."""
    for token in extra_eos_token or []:
        tokens = range(len(tokenizer)) if token.isdecimal() else tokenizer.get_vocab()
        if (int(token) if token.isdecimal() else token) not in tokens:
            raise SnapKVError(f"--extra-eos-token {token!r}: the tokenizer has no such token")
        tokenizer.add_eos_token(token)
    options = template_options or {}
    parameters = inspect.signature(tokenizer._tokenizer.apply_chat_template).parameters
    for name in options.keys() & parameters.keys() - TEMPLATE_OPTIONS:
        raise SnapKVError(f"--chat-template-config can't set {name!r}: the command sets it")
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **options)


def seed_sampling(seed: int | None) -> None:
    import mlx.core as mx

    if seed is not None:
        mx.random.seed(seed)
