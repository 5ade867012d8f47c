"""Commands made of functions: dataclass fields become options, and a user's mistake becomes one sentence."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from ..errors import Option, SnapKVError
from .config import SETTING_OPTIONS, ConfigValue, config_values

Group = TypeVar("Group")

# The panels of `--help`, in its order. An option without a panel is one of the "Options".
PANELS = "Arguments", "Options", "KV cache", "Sampling", "Output", "Model and prompt", "Server"
ARGUMENTS, OPTIONS, KV_CACHE, SAMPLING, OUTPUT, MODEL, SERVER = PANELS


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes each field of the function's dataclass parameters as an option of its own.

    A field is annotated like a parameter of a typer command: `Annotated[int, Option(min=1, help="...")]`. A field of
    the library's `RequestOptions` has its help in the field's metadata instead. The command makes each dataclass from
    the values of its fields and calls the function with it. Other parameters stay unchanged.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            parameters += _parameters_of(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            group_values = {each.name: values.pop(each.name) for each in fields(group)}
            values[name] = group(**group_values)
        function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _parameters_of(group: Any) -> Iterator[inspect.Parameter]:
    """Yield a keyword-only parameter for each field of a dataclass, with the field's default and typer annotation."""
    annotations = get_type_hints(group, include_extras=True)
    for each in fields(group):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if default is MISSING:
            default = inspect.Parameter.empty
        annotation = annotations[each.name]
        if "help" in each.metadata:
            option = typer.Option(help=each.metadata["help"], rich_help_panel=KV_CACHE)
            annotation = Annotated[annotation, option]
        yield inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
        )


# Maps an option to the option that it has no effect without, and to a text that the other option's value must contain.
REQUIRED_OPTIONS = {
    "kv_group_size": ("kv_bits", ""),
    "quantized_kv_start": ("kv_bits", ""),
    "num_draft_tokens": ("draft_model", ""),
    "store_dir": ("store", "file"),
    "kv_memory": ("policy", "auto"),
    "prefix_dir_bytes": ("prefix_dir", ""),
}


class Command(TyperCommand):
    """A command whose options can be set by variables and config.toml, and that rejects options without effect."""

    def config_values(self, ctx: Any) -> dict[str, ConfigValue]:
        """Return the values that variables and config.toml give to the command's options."""
        return config_values(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, with the values from variables and config.toml as defaults.

        Raises: SnapKVError: an option does not allow its value. Other usage errors are typer's own.
        """
        configured = self.config_values(ctx)
        ctx.meta["config"] = configured
        ctx.default_map = {name: each.value for name, each in configured.items()}
        typed_args = list(args)  # click's parser empties `args`
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            source = self._source_of(error.param, ctx, typed_args)
            if source is None:
                raise
            name, value = source
            raise SnapKVError(invalid_value(name, error.param, value, error)) from error
        self._drop_overridden(ctx)
        return rest

    def _source_of(self, option: Any, ctx: Any, args: list[str]) -> tuple[str, Any] | None:
        """Return the name of the flag, variable or key that sets an option, and the value; None if nothing sets it."""
        typed, *_ = self.make_parser(ctx).parse_args(list(args))
        value = typed.get(option.name)
        if value is not None:
            return option.opts[0], value
        configured = ctx.meta["config"].get(option.name)
        return None if configured is None else (configured.origin, configured.value)

    def _drop_overridden(self, ctx: Any) -> None:
        """Reset configured values without effect: overridden values, and a store without sparse attention.

        If one of `SETTING_OPTIONS` was typed, it overrides their configured values. The policy "none" becomes None.
        """
        params = ctx.params
        if any(is_typed(ctx, name) for name in SETTING_OPTIONS):
            self._reset_configured(ctx, SETTING_OPTIONS)
        if params.get("policy") in ("none", ["none"]):
            params["policy"] = None
        # compare has sparse attention by default, and auto may choose it.
        may_be_sparse = self.name == "compare" or params.get("policy") == "auto"
        if not may_be_sparse and params.get("sparse") is None:
            self._reset_configured(ctx, {"store"})

    def _reset_configured(self, ctx: Any, names: set[str]) -> None:
        """Set those of the named options to their defaults that a variable or config.toml has set."""
        configured = ctx.meta["config"]
        for option in self.params:
            is_named = option.name in names and option.name in configured
            if is_named and not is_typed(ctx, option.name):
                ctx.params[option.name] = option.default
                del configured[option.name]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options to the help text, in one section for each panel, without types and negative flags."""
        panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in PANELS}
        options: list[Any] = self.get_params(ctx)
        for option in options:
            default = ARGUMENTS if option.param_type_name == "argument" else OPTIONS
            flags, text = option.get_help_record(ctx)
            flags = re.sub(r" <.*>| / --no-\S+", "", flags)
            panels[option.rich_help_panel or default].append((flags, text))
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. An error that names an option from a variable or config.toml also gives its origin."""
        try:
            self._reject_options_without_effect(ctx)
            return super().invoke(ctx)
        except SnapKVError as error:
            message = in_flags(error)
            for name, configured in ctx.meta["config"].items():
                if not is_typed(ctx, name) and _is_named(message, name, configured.value):
                    message += f" ({flag_of(name)} is from {configured.origin})"
            raise SnapKVError(message) from error

    def _reject_options_without_effect(self, ctx: Any) -> None:
        """Raise SnapKVError if an option was typed without the option that it needs; see `REQUIRED_OPTIONS`."""
        # A store may still come from /policy in a chat, from the choice of auto, or from a saved prompt.
        may_get_store = (
            self.name == "chat"
            or ctx.params.get("policy") == "auto"
            or ctx.params.get("prompt_cache_file") is not None
        )
        for name, (required, text) in REQUIRED_OPTIONS.items():
            if not is_typed(ctx, name) or (name == "store_dir" and may_get_store):
                continue
            value = ctx.params[required]
            if value is None or text not in str(value):
                flag = flag_of(name)
                other = f"{flag_of(required)} {text}".rstrip()
                raise SnapKVError(f"{flag} does nothing without {other}: add that, or drop {flag}")


def _is_named(message: str, option: str, value: Any) -> bool:
    """Return whether an error's message names an option, or the start of its value, such as the policy's name."""
    if flag_of(option) in message:
        return True
    start = re.split("[:=]", value)[0] if isinstance(value, str) else ""
    return start != "" and start in message


def is_typed(ctx: Any, name: str) -> bool:
    """Return whether an option's value is from the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def typed_only(ctx: Any, group: Group, *names: str) -> Group:
    """Return a copy of a dataclass of options in which the named ones have their defaults, unless they were typed.

    Their configured values are also dropped from the context, so that no error gives them as an origin.
    """
    defaults = {each.name: each.default for each in fields(group)}  # type: ignore[arg-type]
    reset = {name: defaults[name] for name in names if not is_typed(ctx, name)}
    for name in reset:
        ctx.meta["config"].pop(name, None)
    return replace(group, **reset)  # type: ignore[type-var]


def invalid_value(name: str, option: Any, value: Any, error: Any) -> str:
    """Return the sentence for a value that an option does not allow: the allowed values, and the value.

    Args:
        name: the flag, variable or key that gave the value.
        option: the option, as typer describes it.
        value: the value that it was given.
        error: the `BadParameter` that typer or the option's `parser` raised.
    """
    kind = getattr(option, "type", option)  # older typers have the range on the option's type
    least = getattr(kind, "min", None)
    most = getattr(kind, "max", None)
    rule = error.message.rstrip(".")
    # For a value that is not a number the error's message stays.
    with contextlib.suppress(ValueError, TypeError):
        if least is not None and not least <= float(value) <= (most or float("inf")):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            rule = f"must be {bounds}"
    colon = "" if rule.startswith("must") else ":"
    values = value if isinstance(value, (list, tuple)) else [value]
    return f"{name}{colon} {rule}, got {', '.join(map(repr, values))}"


def flag_of(name: str) -> str:
    """Return the flag of an option: `max_kv_size` is `--max-kv-size`."""
    return f"--{name.replace('_', '-')}"


def in_flags(error: SnapKVError) -> str:
    """Return an error's message with its options as flags: the library's `max_kv_size=512` is `--max-kv-size 512`."""

    def flag(option: Option) -> str:
        value = "" if option.value is None else f" {option.value}"
        return flag_of(option.name) + value

    return error.message(flag)
