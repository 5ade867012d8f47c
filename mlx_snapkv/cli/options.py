"""Options shared by several commands, and parsers for their values.

`command.with_options` turns the fields of these dataclasses into a command's options.
"""

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from typer import BadParameter, Context, Option

from ..errors import OptionError, SnapKVError, UnknownOptionError, suggestion
from .command import KV_CACHE, MODEL, OUTPUT, SAMPLING, invalid_value_message

MAX_PROMPT_TOKENS = 10_000_000
BYTE_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
TOKEN_UNITS = {"k": 1 << 10, "m": 1 << 20}
# Parameters of `apply_chat_template` that --chat-template-config may set.
SETTABLE_TEMPLATE_PARAMETERS = {"tools", "documents", "chat_template"}


def parse_bytes(text: Any, least: int = 1) -> int:
    """Parse a number of bytes, at least `least`, such as "500MB", "4 GB" or "1.5e9". Units are decimal."""
    bounds = f" from {least:,}" if least > 1 else ""
    rule = f"a number of bytes{bounds}, such as 500MB or 4GB"
    number = str(text).strip().lower().removesuffix("b")
    return _parse_number(number, BYTE_UNITS, least=least, most=2**62, rule=rule)


def parse_limit(text: Any) -> int:
    """Parse a limit in bytes, where 0 means no limit. See `parse_bytes`."""
    return parse_bytes(text, least=0)


def parse_tokens(text: Any) -> int:
    """Parse a number of tokens such as "4096", "128k" or "1M". Units are powers of 1,024."""
    rule = f"a number of tokens from 1 to {MAX_PROMPT_TOKENS}, such as 4096, 128k or 1M"
    number = str(text).strip().lower()
    return _parse_number(number, TOKEN_UNITS, least=1, most=MAX_PROMPT_TOKENS, rule=rule)


def _parse_number(number: str, units: dict[str, Any], least: int, most: int, rule: str) -> int:
    """Parse a number with an optional unit and round it down.

    Args:
        number: text such as "1.5k".
        units: factor of each one-letter unit.
        least: smallest allowed value.
        most: largest allowed value.
        rule: description of the allowed values, for the error message.

    Raises: BadParameter: the text is not a number, or the number is out of range.
    """
    factor = 1
    unit = number[-1:]
    if unit in units:
        factor = units[unit]
        number = number[:-1]
    with contextlib.suppress(ValueError, OverflowError):
        value = int(float(number) * factor)
        if least <= value <= most:
            return value
    raise BadParameter(f"must be {rule}")


def format_tokens(n_tokens: int) -> str:
    """Return a number of tokens as a user would type it, such as "128k" for 131,072."""
    for unit, unit_size in reversed(TOKEN_UNITS.items()):  # largest first
        if n_tokens >= unit_size and n_tokens % unit_size == 0:
            return f"{n_tokens // unit_size}{unit.replace('m', 'M')}"
    return str(n_tokens)


def lengths_parser(least: int) -> Callable[[Any], list[int]]:
    """Return a parser for comma-separated whole numbers from `least` to `MAX_PROMPT_TOKENS`.

    Duplicates are dropped.
    """

    def parse(text: Any) -> list[int]:
        with contextlib.suppress(ValueError):
            lengths = [int(part) for part in str(text).split(",") if part.strip()]
            if all(least <= length <= MAX_PROMPT_TOKENS for length in lengths):
                return list(dict.fromkeys(lengths))
        raise BadParameter(
            f"must be whole numbers from {least} to {MAX_PROMPT_TOKENS}, separated by commas"
        )

    return parse


def one_of(*values: Any) -> Callable[[Any], Any]:
    """Return a parser that accepts one of these values, ignoring case."""
    *others, last = map(str, values)
    value_by_text = {str(value).lower(): value for value in values}

    def parse(text: Any) -> Any:
        lowercase_text = str(text).lower()
        if lowercase_text not in value_by_text:
            raise BadParameter(f"must be {', '.join(others)} or {last}")
        return value_by_text[lowercase_text]

    return parse


def parse_json_object(text: Any) -> dict[str, Any]:
    """Parse text as a JSON object. Raises: BadParameter: the text is not a JSON object."""
    with contextlib.suppress(ValueError):
        value = json.loads(str(text))
        if isinstance(value, dict):
            return value
    raise BadParameter("must be a JSON object, such as '{\"enable_thinking\": false}'")


Model = Annotated[str, Option(help="Model folder, Hugging Face repository, or demo (built in).")]
IgnoreChatTemplate = Annotated[
    bool,
    Option("--ignore-chat-template", help="Use the prompt as raw text.", rich_help_panel=MODEL),
]
SystemPrompt = Annotated[str | None, Option(help="System message for the chat template.")]
MaxTokens = Annotated[
    int, Option("--max-tokens", "-m", min=1, help="Maximum number of answer tokens.")
]
Seed = Annotated[
    int | None, Option(min=0, max=2**64 - 1, help="Sampling seed.", rich_help_panel=SAMPLING)
]
Concurrency = Annotated[int, Option(min=1, max=1024, help="Maximum number of requests at once.")]
DocumentSeed = Annotated[int, Option(help="Seed of the documents.")]
Quiet = Annotated[
    bool,
    Option(
        "--quiet", "-q", help="Print no progress or statistics to stderr.", rich_help_panel=OUTPUT
    ),
]
AsJson = Annotated[
    bool, Option("--json", help="Print one JSON object to stdout.", rich_help_panel=OUTPUT)
]


@dataclass(frozen=True)
class ModelOptions:
    """Options that name a model and control how it is loaded."""

    model: Model
    adapter_path: Annotated[
        str | None, Option(help="Folder of LoRA adapters.", rich_help_panel=MODEL)
    ] = None
    quantize_activations: Annotated[
        bool,
        Option(
            "--quantize-activations",
            "-qa",
            help="Quantise activations as the weights are.",
            rich_help_panel=MODEL,
        ),
    ] = False
    trust_remote_code: Annotated[
        bool,
        Option(
            help="Let the model and its tokenizer run their own code.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = False
    max_kv_bytes: Annotated[
        int | None,
        Option(
            parser=parse_limit,
            metavar="SIZE",
            help="KV memory limit, such as 4GB; 0 for none; default: what the model leaves.",
            rich_help_panel=KV_CACHE,
        ),
    ] = None

    def load(self) -> tuple[Any, Any]:
        """Load the model and its tokenizer. Raises: SnapKVError: see `load_model`."""
        from .loading import load_model

        return load_model(
            self.model,
            self.adapter_path,
            self.trust_remote_code,
            quantize_activations=self.quantize_activations,
            # Only commands that can run on several Macs have --pipeline.
            pipeline=getattr(self, "pipeline", None),
        )


@dataclass(frozen=True)
class ChatModelOptions(ModelOptions):
    """Options for a model, its tokenizer and its chat template."""

    chat_template_config: Annotated[
        Any,
        Option(
            parser=parse_json_object,
            help="Options for the chat template.",
            metavar="JSON",
            rich_help_panel=MODEL,
        ),
    ] = None
    extra_eos_token: Annotated[
        list[str] | None,
        Option(help="Another token that ends answers; repeatable.", rich_help_panel=MODEL),
    ] = None

    def load(self) -> tuple[Any, Any]:
        """Load the model and its tokenizer, and apply template options and extra end-of-answer tokens."""
        model, tokenizer = super().load()
        adapt_tokenizer(tokenizer, self.extra_eos_token, self.chat_template_config)
        return model, tokenizer


@dataclass(frozen=True)
class ShardedModelOptions(ChatModelOptions):
    """Options for a model that several Macs can share."""

    pipeline: Annotated[
        bool,
        Option(
            help="With mlx.launch, give each Mac whole layers, not slices of each.",
            show_default=False,
            rich_help_panel=MODEL,
        ),
    ] = False


@dataclass(frozen=True)
class DraftOptions:
    """Options for a draft model."""

    draft_model: Annotated[
        str | None,
        Option(
            help="Small model with the same tokenizer that drafts tokens.", rich_help_panel=MODEL
        ),
    ] = None
    num_draft_tokens: Annotated[
        int,
        Option(min=1, help="Tokens that the draft model drafts at a time.", rich_help_panel=MODEL),
    ] = 3

    def load(self, tokenizer: Any, trust_remote_code: bool) -> dict[str, Any]:
        """Load the draft model, if any, and return the `stream_generate` keywords for it.

        Raises: SnapKVError: the draft model can't be loaded, or its tokenizer and the main model's `tokenizer` have
            vocabularies of different sizes.
        """
        from .loading import load_model

        name = self.draft_model
        if name is None:
            return {}
        model, draft_tokenizer = load_model(name, None, trust_remote_code, option="--draft-model")
        if draft_tokenizer.vocab_size != tokenizer.vocab_size:
            raise SnapKVError(
                f"--draft-model {name}: its tokenizer has {draft_tokenizer.vocab_size} tokens, but the model's has "
                f"{tokenizer.vocab_size}; a draft model needs the model's own tokenizer"
            )
        return {"draft_model": model, "num_draft_tokens": self.num_draft_tokens}


@dataclass(frozen=True)
class OutputOptions:
    """Options for the output on stdout and stderr."""

    quiet: Quiet = False
    as_json: AsJson = False


@dataclass(frozen=True)
class SamplingOptions:
    """mlx-lm's sampling options, and the maximum answer length."""

    temp: Annotated[float, Option(min=0, max=100, help="Sampling temperature; 0 is greedy.")] = 0.0
    top_p: Annotated[
        float,
        Option(min=0, max=1, help="Sampling top-p; 1 turns it off.", rich_help_panel=SAMPLING),
    ] = 1.0
    min_p: Annotated[
        float,
        Option(min=0, max=1, help="Sampling min-p; 0 turns it off.", rich_help_panel=SAMPLING),
    ] = 0.0
    top_k: Annotated[
        int, Option(min=0, help="Sampling top-k; 0 turns it off.", rich_help_panel=SAMPLING)
    ] = 0
    min_tokens_to_keep: Annotated[
        int,
        Option(min=1, help="Minimum number of tokens that min-p keeps.", rich_help_panel=SAMPLING),
    ] = 1
    xtc_probability: Annotated[
        float, Option(min=0, max=1, help="XTC probability.", rich_help_panel=SAMPLING)
    ] = 0.0
    xtc_threshold: Annotated[
        float, Option(min=0, max=0.5, help="XTC threshold.", rich_help_panel=SAMPLING)
    ] = 0.1
    max_tokens: MaxTokens = 256

    def with_option(self, name: str, text: str, context: Context) -> "SamplingOptions":
        """Return a copy with the option `name` set to the value in `text`.

        The command's `context` provides the parser for the value.

        Raises: SnapKVError: the option does not exist, or the value is invalid.
        """
        name = name.lstrip("-").replace("-", "_")  # also accepts --top-p
        names = list(vars(self))
        if name not in names:
            commands = ", ".join(f"/set {known_name}" for known_name in names)
            raise UnknownOptionError(
                f"unknown setting {name}{suggestion(name, names)}: one of {commands}"
            )
        options = {option.name: option for option in context.command.params}
        option = options[name]
        try:
            value = option.process_value(context, text)
        except BadParameter as error:
            raise SnapKVError(invalid_value_message(f"/set {name}", option, text, error)) from error
        return replace(self, **{name: value})

    def require_within_vocabulary(self, tokenizer: Any) -> None:
        """Raise OptionError if `top_k` or `min_tokens_to_keep` is not smaller than the vocabulary."""
        vocabulary_size = len(tokenizer)
        for name in ("top_k", "min_tokens_to_keep"):
            value = getattr(self, name)
            if value >= vocabulary_size:
                raise OptionError(name, f"less than the vocabulary's {vocabulary_size}", value)

    def generate_keywords(self, tokenizer: Any) -> dict[str, Any]:
        """Return the keywords `max_tokens` and `sampler` for mlx-lm's `stream_generate`.

        Raises: SnapKVError: `top_k` or `min_tokens_to_keep` is not smaller than the vocabulary.
        """
        from mlx_lm.sample_utils import make_sampler

        self.require_within_vocabulary(tokenizer)
        options = dict(vars(self))
        del options["max_tokens"]
        # Exempt line breaks and end-of-sequence tokens from XTC, so that it prevents neither.
        special_tokens = tokenizer.encode("\n") + list(tokenizer.eos_token_ids)
        sampler = make_sampler(xtc_special_tokens=special_tokens, **options)
        return {"max_tokens": self.max_tokens, "sampler": sampler}


def adapt_tokenizer(
    tokenizer, extra_eos_token: Sequence[str] | None, template_options: dict[str, Any] | None
) -> None:
    """Add end-of-answer tokens (text or ids) and chat-template options to a tokenizer, in place.

    Raises: SnapKVError: the tokenizer does not have one of the tokens, or `template_options` contains an option that
        the command sets itself.
    """
    for token in extra_eos_token or []:
        if not _has_token(tokenizer, token):
            raise SnapKVError(f"--extra-eos-token {token!r}: the tokenizer has no such token")
        tokenizer.add_eos_token(token)
    options = template_options or {}
    parameters = inspect.signature(tokenizer._tokenizer.apply_chat_template).parameters
    forbidden_names = set(parameters) - SETTABLE_TEMPLATE_PARAMETERS
    for name in options:
        if name in forbidden_names:
            raise SnapKVError(f"--chat-template-config can't set {name!r}: the command sets it")
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **options)


def _has_token(tokenizer: Any, token: str) -> bool:
    """Check whether the vocabulary contains a token, given as its id or its text."""
    if token.isdecimal():
        return int(token) < len(tokenizer)
    return token in tokenizer.get_vocab()


def seed_sampling(seed: int | None) -> None:
    """Seed MLX's random number generator, unless `seed` is None."""
    import mlx.core as mx

    if seed is not None:
        mx.random.seed(seed)
