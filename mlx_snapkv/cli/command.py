"""How a function becomes a command: its option groups as options, and sentences that name what was typed."""

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from ..errors import GONE, Option, SnapKVError, gone
from .config import ONE_OF, Setting, settings_of


def option(help: str, default: Any = None, *flags: str, **more: Any) -> Any:
    """A field of an option group: its help, its default (`...` is none), and what else typer's `Option` takes.

    Args:
        *flags: short ones beside the field's name, or a long one in its place.
    """
    start: dict[str, Any] = {"default": MISSING if default is ... else default}
    if isinstance(default, list):
        start = {"default_factory": default.copy}
    return field(**start, metadata={"flags": flags, "help": help, **more})


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """A command that takes the fields of the function's option groups as options of its own.

    An option group is a dataclass whose fields are `option`s or annotated as typer's. The command makes each group from
    its fields' values and calls the function with it; parameters that are not groups stay as they are.
    """
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            parameters += _options_of(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**arguments: Any) -> None:
        for name, group in groups.items():
            arguments[name] = group(
                **{field.name: arguments.pop(field.name) for field in fields(group)}
            )
        function(**arguments)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _options_of(group: Any) -> Iterator[inspect.Parameter]:
    """A keyword of the command for each field of a group, with typer's option if it is an `option`."""
    types = get_type_hints(group, include_extras=True)
    for each in fields(group):
        default = each.default if each.default_factory is MISSING else each.default_factory()
        kind, more = types[each.name], dict(each.metadata)
        if more:
            flags = more.pop("flags")
            long = () if any(flag.startswith("--") for flag in flags) else (flag_of(each.name),)
            kind = Annotated[kind, typer.Option(*long, *flags, **more)]
        made = inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
        yield made if default is MISSING else made.replace(default=default)


# By option, the one it does nothing without, and what that one's value must contain.
NEEDS = {
    "kv_group_size": ("kv_bits", ""),
    "quantized_kv_start": ("kv_bits", ""),
    "num_draft_tokens": ("draft_model", ""),
    "store_dir": ("memory", "recall:file"),
    "kv_memory": ("policy", "auto"),
    "prefix_dir_bytes": ("prefix_dir", ""),
}
LATER = {"store_dir"}  # which a chat, or what --policy auto takes, may need

# What only policies and sparse attention have a use for, and commands that choose one without being told.
FOR_POLICY = {"memory", "verify", "far"}
CHOOSING = {"chat", "compare"}

# What a prompt saved before has settled.
SETTLED = ("system_prompt", "prefill_response", "max_kv_size", "draft_model")
# What it has its own of, unless the command line says otherwise.
BROUGHT = ("snapkv", "policy", "sparse", "memory", "verify", "far", "kv_bits")


class Command(TyperCommand):
    """A command whose options may be set by variables and config.toml, and which refuses those that do nothing."""

    def settings(self, ctx: Any) -> dict[str, Setting]:
        """What variables and config.toml say of the command's options."""
        return settings_of(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        settings = ctx.meta["settings"] = self.settings(ctx)
        ctx.default_map = {name: setting.value for name, setting in settings.items()}
        try:
            typed, _, _ = self.make_parser(ctx).parse_args(list(args))
        except Exception as error:
            name = str(getattr(error, "option_name", "")).lstrip("-").replace("-", "_")
            if name in GONE:
                raise gone(name) from error
            raise
        try:
            rest = super().parse_args(ctx, args)
        except Exception as error:
            option: Any = getattr(error, "param", None)
            name = getattr(option, "name", "")
            value, where = settings.get(name, (None, ""))
            if name in typed:
                value, where = typed[name], option.opts[0]
            if value is None:
                raise
            raise SnapKVError(refusal(where, option, value, error)) from error
        dropped = set(ONE_OF) if ONE_OF & typed.keys() else set()
        if ctx.params.get("prompt_cache_file") is not None:
            dropped |= {*SETTLED, *BROUGHT}
        self._drop(ctx, settings.keys() & dropped - typed.keys())
        if ctx.params.get("policy") in ("none", ["none"]):
            ctx.params["policy"] = None
        if not self._may_choose(ctx.params):
            self._drop(ctx, settings.keys() & FOR_POLICY - typed.keys())
        return rest

    def _may_choose(self, params: dict[str, Any]) -> bool:
        """Whether there is a policy or sparse attention, or there may be one later."""
        return (
            "far" not in params
            or self.name in CHOOSING
            or any(params.get(n) is not None for n in ONE_OF)
        )

    def _drop(self, ctx: Any, names: set[str]) -> None:
        """Leave out what variables and config.toml say of these options."""
        for option in self.params:
            if option.name in names:
                ctx.params[option.name] = option.default
                del ctx.meta["settings"][option.name]

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
                if is_named and _source(ctx, name) == "DEFAULT_MAP":
                    text += f" ({flag_of(name)} is from {origin})"
            raise SnapKVError(text) from error

    def _require_use(self, ctx: Any) -> None:
        exempt = LATER if self.name == "chat" or ctx.params.get("policy") == "auto" else set()
        if ctx.params.get("prompt_cache_file") is not None:
            exempt = {"store_dir"}  # for a book
            for flag in (flag_of(name) for name in SETTLED if ctx.params[name] is not None):
                raise SnapKVError(f"{flag} can't be combined with --prompt-cache-file: drop it")
        for name in [name for name in NEEDS if name in ctx.params.keys() - exempt]:
            needed, part = NEEDS[name]
            value, flag = ctx.params[needed], flag_of(name)
            if _source(ctx, name) == "COMMANDLINE" and (value is None or part not in str(value)):
                other = f"{flag_of(needed)} {part}".rstrip()
                raise SnapKVError(f"{flag} does nothing without {other}: add that, or drop {flag}")


def _source(ctx: Any, name: str) -> str:
    return ctx.get_parameter_source(name).name


def refusal(name: str, option: Any, value: Any, error: Any) -> str:
    """What an option must be, and what it got, for an error of typer's or of its `parser`."""
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
    """An error's sentence for those who typed flags: the library's `memory=recall` is `--memory recall`."""

    def flag(option: Option) -> str:
        value = "" if option.value is None else f" {option.value}"
        return flag_of(option.name) + value

    return error.message(flag)
