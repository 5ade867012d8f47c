"""Build typer commands from functions with dataclass parameters, and report usage errors in one sentence."""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from ..errors import Option, SnapKVError
from .config import SETTING_OPTIONS, ConfigValue, config_values

# Panels of `--help`, in order. Options without a panel go to "Options".
PANELS = "Arguments", "Options", "KV cache", "Sampling", "Output", "Model and prompt", "Server"
ARGUMENTS, OPTIONS, KV_CACHE, SAMPLING, OUTPUT, MODEL, SERVER = PANELS


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Turn a function into a command with one option per field of its dataclass parameters.

    Fields are annotated like a typer command's parameters: `Annotated[int, Option(min=1, help="...")]`. Fields for
    `Sparse` options have their help text in the field metadata instead. The command builds each dataclass from its
    option values and calls the function. Other parameters keep their annotations, but become keyword-only.
    """
    option_groups: dict[str, Any] = {}  # parameter name -> dataclass
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if is_dataclass(parameter.annotation):
            option_groups[name] = parameter.annotation
            parameters += _option_parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, option_group in option_groups.items():
            field_values = {field.name: values.pop(field.name) for field in fields(option_group)}
            values[name] = option_group(**field_values)
        function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _option_parameters(option_group: Any) -> Iterator[inspect.Parameter]:
    """Yield a keyword-only parameter, with default and typer annotation, for each field of a dataclass."""
    annotations = get_type_hints(option_group, include_extras=True)
    for field in fields(option_group):
        default: Any = inspect.Parameter.empty
        if field.default is not MISSING:
            default = field.default
        elif field.default_factory is not MISSING:
            default = field.default_factory()
        annotation = annotations[field.name]
        if "help" in field.metadata:
            option = typer.Option(help=field.metadata["help"], rich_help_panel=KV_CACHE)
            annotation = Annotated[annotation, option]
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )


# Matches what the help text leaves out: " <int range>" in "--seed <int range>", and " / --no-pipeline" in "--pipeline /
# --no-pipeline".
_TYPE_OR_NEGATION = re.compile(r" <.*>| / --no-\S+")

# Option -> (required option, texts). The required option's value must contain at least one of the texts. If there are
# no texts, any value is allowed.
REQUIRED_OPTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kv_group_size": ("kv_bits", ()),
    "quantized_kv_start": ("kv_bits", ()),
    "num_draft_tokens": ("draft_model", ()),
    "store_dir": ("store", ("file",)),
    "kv_memory": ("policy", ("auto",)),
    "prefix_dir_bytes": ("prefix_dir", ()),
    "question": ("setting", ("known", "later")),
}
# Options that can't be combined with a saved prompt.
EXCLUDED_BY_SAVED_PROMPT = (
    "prefill_response",
    "system_prompt",
    "draft_model",
    "num_draft_tokens",
    "max_kv_size",
    "kv_memory",
)
# Configured values of these options are ignored with a saved prompt. Only typed values apply.
STORED_WITH_SAVED_PROMPT = *SETTING_OPTIONS, "kv_bits", "store", "store_dir"


class Command(TyperCommand):
    """A command that also reads options from environment variables and config.toml.

    Options without effect are rejected if they were typed, and ignored if they were configured.
    """

    def config_values(self, ctx: Any) -> dict[str, ConfigValue]:
        """Return the command's option values from environment variables and config.toml."""
        return config_values(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, with values from variables and config.toml as defaults.

        Raises: SnapKVError: config.toml or an option's value is invalid, or --policy none has no effect. Other usage
            errors raise typer's exceptions.
        """
        configured_values = self.config_values(ctx)
        ctx.meta["config"] = configured_values
        ctx.default_map = {name: configured.value for name, configured in configured_values.items()}
        typed_args = list(args)  # click's parser empties `args`
        try:
            remaining_args = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            invalid = self._unparsed_value(error.param, ctx, typed_args)
            if invalid is None:
                raise
            message = invalid_value_message(invalid.origin, error.param, invalid.value, error)
            raise SnapKVError(message) from error
        self._reset_values_without_effect(ctx)
        return remaining_args

    def _unparsed_value(self, option: Any, ctx: Any, args: list[str]) -> ConfigValue | None:
        """Return an option's unparsed value and its origin: a flag, variable or config key. Return None if unset."""
        values_by_name, *_ = self.make_parser(ctx).parse_args(args)
        typed_value = values_by_name.get(option.name)
        if typed_value is not None:
            flag = option.opts[0]
            return ConfigValue(typed_value, origin=flag)
        return ctx.meta["config"].get(option.name)

    def _reset_values_without_effect(self, ctx: Any) -> None:
        """Reset configured values that have no effect, and change the policy "none" to None.

        A saved prompt has its own setting, so configured values that conflict with a saved prompt are reset. If
        --snapkv, --policy or --sparse was typed, the configured values of all three are reset. A configured store is
        reset if nothing can select sparse attention, or if a typed --sparse names a store.

        Raises: SnapKVError: --policy none was typed for `compare`, but there is no configured setting to override.
        """
        params = ctx.params
        if params.get("prompt_cache_file") is not None:
            self._reset_configured(ctx, {*EXCLUDED_BY_SAVED_PROMPT, *STORED_WITH_SAVED_PROMPT})
        overrides_setting = not SETTING_OPTIONS.isdisjoint(ctx.meta["config"])
        if any(is_typed(ctx, name) for name in SETTING_OPTIONS):
            self._reset_configured(ctx, SETTING_OPTIONS)
        is_typed_none = params.get("policy") == ["none"] and is_typed(ctx, "policy")
        if is_typed_none and self.name == "compare" and not overrides_setting:
            raise SnapKVError(
                "--policy none adds nothing here, since the full cache is always included: drop it"
            )
        if params.get("policy") in ("none", ["none"]):
            params["policy"] = None
        may_use_sparse = (
            params.get("sparse") is not None
            or self.name == "compare"  # includes sparse attention by default
            or params.get("policy") == "auto"  # may select sparse attention
            or self.name == "chat"  # /policy may select it later
        )
        sparse_stores = values_in_sparse(params.get("sparse"), "store")
        typed_sparse_names_store = is_typed(ctx, "sparse") and len(sparse_stores) > 0
        if typed_sparse_names_store or not may_use_sparse:
            self._reset_configured(ctx, {"store"})

    def _reset_configured(self, ctx: Any, names: set[str]) -> None:
        """Reset the named options if a variable or config.toml set them."""
        configured_values = ctx.meta["config"]
        for option in self.params:
            name = option.name
            if name in names and name in configured_values and not is_typed(ctx, name):
                ctx.params[name] = option.default
                del configured_values[name]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options to the help text, one section per panel, without types and --no- flags."""
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in PANELS}
        options: list[Any] = self.get_params(ctx)
        for option in options:
            default_panel = ARGUMENTS if option.param_type_name == "argument" else OPTIONS
            flags, help_text = option.get_help_record(ctx)
            flags = _TYPE_OR_NEGATION.sub("", flags)
            panels[option.rich_help_panel or default_panel].append((flags, help_text))
        for panel, flags_and_help in panels.items():
            if flags_and_help:
                with formatter.section(panel):
                    formatter.write_dl(flags_and_help)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. An error about a configured option says where the option's value comes from."""
        try:
            self._reject_conflicting_values(ctx)
            self._reject_options_without_effect(ctx)
            return super().invoke(ctx)
        except SnapKVError as error:
            message = message_with_flags(error)
            for name, configured in ctx.meta["config"].items():
                if not is_typed(ctx, name) and _mentions_option(message, name, configured.value):
                    message += f" ({flag_of(name)} is from {configured.origin})"
            raise SnapKVError(message) from error

    def _reject_conflicting_values(self, ctx: Any) -> None:
        """Reject a --store or --store-dir that contradicts --sparse. Raises: SnapKVError.

        If --sparse names a default value, such as store=memory, this contradicts a flag only if --sparse and the flag
        were both typed. Otherwise, the flag's value replaces the default.
        """
        sparse = ctx.params.get("sparse")
        if sparse is None:
            return
        from ..sparse.options import Sparse

        for name in ("store", "store_dir"):
            value = ctx.params.get(name)
            are_typed = is_typed(ctx, "sparse") and is_typed(ctx, name)
            for sparse_value in values_in_sparse(sparse, name):
                counts = are_typed or sparse_value != getattr(Sparse, name)
                if counts and value not in (None, sparse_value):
                    raise SnapKVError(
                        f"--sparse {name}={sparse_value} and {flag_of(name)} {value} differ: give only one of them"
                    )

    def _reject_options_without_effect(self, ctx: Any) -> None:
        """Reject typed options that would do nothing, or can't be combined with a saved prompt. Raises: SnapKVError."""
        if ctx.params.get("prompt_cache_file") is not None:
            for name in EXCLUDED_BY_SAVED_PROMPT:
                if is_typed(ctx, name):
                    raise SnapKVError(
                        f"{flag_of(name)} can't be combined with --prompt-cache-file: drop it"
                    )
        # Without --store, the file store can still be selected by --sparse, /policy in a chat, --policy auto, or a
        # saved prompt.
        may_get_file_store = (
            "file" in values_in_sparse(ctx.params.get("sparse"), "store")
            or self.name == "chat"
            or ctx.params.get("policy") == "auto"
            or ctx.params.get("prompt_cache_file") is not None
        )
        for name, (required_name, texts) in REQUIRED_OPTIONS.items():
            if not is_typed(ctx, name) or (name == "store_dir" and may_get_file_store):
                continue
            value = ctx.params[required_name]
            contains_text = not texts or any(text in str(value) for text in texts)
            if value is None or not contains_text:
                flag = flag_of(name)
                required = f"{flag_of(required_name)} {' or '.join(texts)}".rstrip()
                raise SnapKVError(
                    f"{flag} does nothing without {required}: add that, or drop {flag}"
                )


def values_in_sparse(sparse: str | list[str] | None, name: str) -> list[str]:
    """Return every value given for the option `name` in one --sparse text or in a list of them.

    For example, return ["file"] for the option "store" in "top_k=1024, store=file".
    """
    texts = [sparse] if isinstance(sparse, str) else sparse or []
    options = [option.partition("=") for text in texts for option in text.split(",")]
    return [value.strip() for option, _, value in options if option.strip() == name]


def _mentions_option(message: str, option: str, value: Any) -> bool:
    """Return whether an error message mentions an option's flag, or the start of its value, such as a policy name."""
    if flag_of(option) in message:
        return True
    if not isinstance(value, str):
        return False
    policy_or_key, *_ = re.split("[:=]", value)  # e.g. "keydiff" in "keydiff:budget=64"
    return policy_or_key != "" and policy_or_key in message


def is_typed(ctx: Any, name: str) -> bool:
    """Return whether an option was typed on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def invalid_value_message(name: str, option: Any, value: Any, error: Any) -> str:
    """Return the error message for an invalid option value, with the allowed values.

    Args:
        name: flag, variable, config key or /set command that set the value.
        option: typer's object for the option.
        value: the invalid value.
        error: `BadParameter` raised by typer or by the option's `parser`.
    """
    rule = _range_rule(option, value) or error.message.rstrip(".")
    subject = name if rule.startswith("must") else f"{name}:"
    values = value if isinstance(value, (list, tuple)) else [value]
    return f"{subject} {rule}, got {', '.join(map(repr, values))}"


def _range_rule(option: Any, value: Any) -> str | None:
    """Describe the option's range if `value` is a number outside it. Return None otherwise."""
    # Older versions of typer store the range in the option's type.
    range_owner = getattr(option, "type", option)
    least = getattr(range_owner, "min", None)
    most = getattr(range_owner, "max", None)
    if least is None:
        return None
    try:
        number = float(value)
    except (ValueError, TypeError):
        return None
    is_in_range = number >= least and (most is None or number <= most)
    if is_in_range:
        return None
    return f"must be at least {least}" if most is None else f"must be from {least} to {most}"


def flag_of(name: str) -> str:
    """Return an option's flag: `max_kv_size` becomes `--max-kv-size`."""
    return f"--{name.replace('_', '-')}"


def message_with_flags(error: SnapKVError) -> str:
    """Return an error message with flags in place of keywords: `max_kv_size=512` becomes `--max-kv-size 512`."""

    def as_flag(option: Option) -> str:
        flag = flag_of(option.name)
        return flag if option.value is None else f"{flag} {option.value}"

    return error.message(as_flag)
