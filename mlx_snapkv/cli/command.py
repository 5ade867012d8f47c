"""How a function becomes a command: the fields of its dataclasses are its options, and mistakes get one sentence."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from ..errors import Option, SnapKVError
from .config import ONE_OF, Setting, settings_of

Group = TypeVar("Group")


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes each field of the function's dataclass parameters as an option of its own.

    A field is annotated as typer wants a parameter: `Annotated[int, Option(min=1, help="...")]`; one of the library's
    `RequestOptions` has its help with it. The command makes each dataclass from its fields' values and calls the
    function with it; other parameters stay as they are.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if not is_dataclass(group := parameter.annotation):
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        groups[name], types = group, get_type_hints(group, include_extras=True)
        for each in fields(group):
            default = each.default if each.default_factory is MISSING else each.default_factory()
            default = inspect.Parameter.empty if default is MISSING else default
            annotation = types[each.name]
            if "help" in each.metadata:
                annotation = Annotated[annotation, typer.Option(help=each.metadata["help"])]
            parameters.append(
                inspect.Parameter(
                    each.name, parameter.KEYWORD_ONLY, default=default, annotation=annotation
                )
            )

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        function(**values)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


# An option does nothing unless the other one's value contains this text.
NEEDS = {
    "kv_group_size": ("kv_bits", ""),
    "quantized_kv_start": ("kv_bits", ""),
    "num_draft_tokens": ("draft_model", ""),
    "store_dir": ("store", "file"),
    "kv_memory": ("policy", "auto"),
    "prefix_dir_bytes": ("prefix_dir", ""),
}


class Command(TyperCommand):
    """A command whose options may be set by variables and config.toml, and which refuses an option without effect."""

    def settings(self, ctx: Any) -> dict[str, Setting]:
        """Return what variables and config.toml say of the command's options."""
        return settings_of(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, with the settings as click's `default_map`."""
        settings = ctx.meta["settings"] = self.settings(ctx)
        ctx.default_map = {name: setting.value for name, setting in settings.items()}
        given = list(args)  # click's parser empties `args`
        try:
            rest = super().parse_args(ctx, args)
        except typer.BadParameter as error:
            option: Any = error.param
            typed, *_ = self.make_parser(ctx).parse_args(given)
            if (value := typed.get(option.name)) is not None:
                raise SnapKVError(refusal(option.opts[0], option, value, error)) from error
            if option.name in settings:
                value, where = settings[option.name]
                raise SnapKVError(refusal(where, option, value, error)) from error
            raise
        self._pass_over_settings(ctx)
        return rest

    def _pass_over_settings(self, ctx: Any) -> None:
        """Leave out settings that the command line replaces, and a store where there is no sparse attention."""
        params = ctx.params
        if any(is_typed(ctx, name) for name in ONE_OF):
            self._drop_settings(ctx, ONE_OF)
        if params.get("policy") in ("none", ["none"]):  # the full cache, whatever a setting says
            params["policy"] = None
        may_be_sparse = self.name == "compare" or params.get("policy") == "auto"
        if not may_be_sparse and params.get("sparse") is None:
            self._drop_settings(ctx, {"store"})

    def _drop_settings(self, ctx: Any, names: set[str]) -> None:
        """Set these options to their defaults, unless they were typed."""
        settings = ctx.meta["settings"]
        for option in self.params:
            if option.name in names & settings.keys() and not is_typed(ctx, option.name):
                ctx.params[option.name] = option.default
                del settings[option.name]

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a mistake's sentence also says which settings that it names come from elsewhere."""
        try:
            self._require_use(ctx)
            return super().invoke(ctx)
        except SnapKVError as error:
            text = in_flags(error)
            for name, (value, origin) in ctx.meta["settings"].items():
                start = re.split("[:=]", value)[0] if isinstance(value, str) else ""
                is_named = flag_of(name) in text or (start and start in text)
                if is_named and not is_typed(ctx, name):
                    text += f" ({flag_of(name)} is from {origin})"
            raise SnapKVError(text) from error

    def _require_use(self, ctx: Any) -> None:
        """Raises: SnapKVError: an option that was typed does nothing without another."""
        may_need_later = self.name == "chat" or ctx.params.get("policy") == "auto"
        may_need_later |= ctx.params.get("prompt_cache_file") is not None
        for name, (needed, part) in NEEDS.items():
            if not is_typed(ctx, name) or (name == "store_dir" and may_need_later):
                continue
            value, flag = ctx.params[needed], flag_of(name)
            if value is None or part not in str(value):
                other = f"{flag_of(needed)} {part}".rstrip()
                raise SnapKVError(f"{flag} does nothing without {other}: add that, or drop {flag}")


def is_typed(ctx: Any, name: str) -> bool:
    """Return whether an option's value is from the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def without_settings(ctx: Any, group: Group, *names: str) -> Group:
    """Return the same options with the defaults of these, unless they were typed."""
    defaults = {each.name: each.default for each in fields(group)}  # type: ignore[arg-type]
    unset = {name: defaults[name] for name in names if not is_typed(ctx, name)}
    for name in unset:
        ctx.meta["settings"].pop(name, None)
    return replace(group, **unset)  # type: ignore[type-var]


def refusal(name: str, option: Any, value: Any, error: Any) -> str:
    """Return what an option must be and what it got, for an error of typer's or of the option's `parser`."""
    kind = getattr(option, "type", option)  # older typers have the range there
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    values = value if isinstance(value, (list, tuple)) else [value]
    rule = error.message.rstrip(".")
    with contextlib.suppress(ValueError, TypeError):
        if least is not None and not least <= float(value) <= (most or float("inf")):
            rule = f"must be {f'at least {least}' if most is None else f'from {least} to {most}'}"
    colon = "" if rule.startswith("must") else ":"
    return f"{name}{colon} {rule}, got {', '.join(map(repr, values))}"


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def in_flags(error: SnapKVError) -> str:
    """Return an error's sentence with its options as flags: the library's `max_kv_size=512` is `--max-kv-size 512`."""

    def flag(option: Option) -> str:
        value = "" if option.value is None else f" {option.value}"
        return flag_of(option.name) + value

    return error.message(flag)
