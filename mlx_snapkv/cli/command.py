"""Make commands from functions: dataclass fields become options, and mistakes become one sentence."""

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

# The panels of `--help`, in order. Options without a panel are in "Options".
PANELS = "Arguments", "Options", "KV cache", "Sampling", "Output", "Model and prompt", "Server"
ARGUMENTS, OPTIONS, KV_CACHE, SAMPLING, OUTPUT, MODEL, SERVER = PANELS


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for each field of the function's dataclass parameters.

    Fields are annotated like parameters of a typer command: `Annotated[int, Option(min=1, help="...")]`. Fields that
    are options of the library's `Sparse` have their help in metadata instead. The command creates each dataclass from
    the values of its fields, and calls the function. Other parameters do not change.
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
    """Yield a keyword-only parameter for each field of a dataclass, with its default and typer annotation."""
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


# Option -> (option without which it has no effect, text that the value of this option must contain).
REQUIRED_OPTIONS = {
    "kv_group_size": ("kv_bits", ""),
    "quantized_kv_start": ("kv_bits", ""),
    "num_draft_tokens": ("draft_model", ""),
    "store_dir": ("store", "file"),
    "kv_memory": ("policy", "auto"),
    "prefix_dir_bytes": ("prefix_dir", ""),
}


class Command(TyperCommand):
    """A command that also takes options from variables and config.toml, and rejects options without effect."""

    def config_values(self, ctx: Any) -> dict[str, ConfigValue]:
        """Return the values of the command's options in variables and config.toml."""
        return config_values(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line. Values from variables and config.toml are the defaults.

        Raises: SnapKVError: an option does not allow its value. Other usage errors are typer's.
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
        """Return the flag, variable or key that sets an option, and the value; None if the option is not set."""
        typed, *_ = self.make_parser(ctx).parse_args(list(args))
        value = typed.get(option.name)
        if value is not None:
            return option.opts[0], value
        configured = ctx.meta["config"].get(option.name)
        return None if configured is None else (configured.origin, configured.value)

    def _drop_overridden(self, ctx: Any) -> None:
        """Reset configured values without effect: overridden values, and a store that sparse attention does not use.

        If one of `SETTING_OPTIONS` was typed, it overrides their configured values. The policy "none" becomes None.
        """
        params = ctx.params
        if any(is_typed(ctx, name) for name in SETTING_OPTIONS):
            self._reset_configured(ctx, SETTING_OPTIONS)
        if params.get("policy") in ("none", ["none"]):
            params["policy"] = None
        # compare includes sparse attention by default, and auto may select it.
        may_be_sparse = self.name == "compare" or params.get("policy") == "auto"
        names_store = is_typed(ctx, "sparse") and _stores_in(params["sparse"])
        if names_store or (not may_be_sparse and params.get("sparse") is None):
            self._reset_configured(ctx, {"store"})

    def _reset_configured(self, ctx: Any, names: set[str]) -> None:
        """Reset those of the named options that were set by a variable or config.toml."""
        configured = ctx.meta["config"]
        for option in self.params:
            is_named = option.name in names and option.name in configured
            if is_named and not is_typed(ctx, option.name):
                ctx.params[option.name] = option.default
                del configured[option.name]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options to the help text, in one section per panel, without types and negative flags."""
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
        """Run the command. If an error is about an option from a variable or config.toml, add its origin."""
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
        """Reject typed options that need another option (see `REQUIRED_OPTIONS`). Raises: SnapKVError."""
        # A store may still come from --sparse, from /policy in a chat, from auto, or from a saved prompt.
        may_get_store = (
            "file" in _stores_in(ctx.params.get("sparse"))
            or self.name == "chat"
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


def _stores_in(sparse: Any) -> list[str]:
    """Return the stores that the values of --sparse name, such as "file" in "top_k=1024,store=file"."""
    return re.findall(r"\bstore\s*=\s*(\w+)", str(sparse))


def _is_named(message: str, option: str, value: Any) -> bool:
    """Return whether an error's message names an option, or the start of its value, such as a policy's name."""
    if flag_of(option) in message:
        return True
    start = re.split("[:=]", value)[0] if isinstance(value, str) else ""
    return start != "" and start in message


def is_typed(ctx: Any, name: str) -> bool:
    """Return whether an option was typed on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def typed_only(ctx: Any, group: Group, *names: str) -> Group:
    """Return a copy of a dataclass of options, in which the named ones are reset unless they were typed.

    Their configured values are also removed from the context, so that errors do not name them as an origin.
    """
    defaults = {each.name: each.default for each in fields(group)}  # type: ignore[arg-type]
    reset = {name: defaults[name] for name in names if not is_typed(ctx, name)}
    for name in reset:
        ctx.meta["config"].pop(name, None)
    return replace(group, **reset)  # type: ignore[type-var]


def invalid_value(name: str, option: Any, value: Any, error: Any) -> str:
    """Return the error sentence for a value that an option does not allow, with the allowed values.

    Args:
        name: flag, variable or key that set the value.
        option: the option, in typer's representation.
        value: the value.
        error: the `BadParameter` raised by typer or by the option's `parser`.
    """
    # Older versions of typer have the range in the option's type.
    kind = getattr(option, "type", option)
    least = getattr(kind, "min", None)
    most = getattr(kind, "max", None)
    rule = error.message.rstrip(".")
    # If the value is not a number, the error's message is kept.
    with contextlib.suppress(ValueError, TypeError):
        if least is not None and not least <= float(value) <= (most or float("inf")):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            rule = f"must be {bounds}"
    colon = "" if rule.startswith("must") else ":"
    values = value if isinstance(value, (list, tuple)) else [value]
    return f"{name}{colon} {rule}, got {', '.join(map(repr, values))}"


def flag_of(name: str) -> str:
    """Return the flag of an option: `max_kv_size` becomes `--max-kv-size`."""
    return f"--{name.replace('_', '-')}"


def in_flags(error: SnapKVError) -> str:
    """Return an error's message with flags in place of keywords: `max_kv_size=512` becomes `--max-kv-size 512`."""

    def flag(option: Option) -> str:
        value = "" if option.value is None else f" {option.value}"
        return flag_of(option.name) + value

    return error.message(flag)
