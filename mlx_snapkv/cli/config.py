"""What options are where the command line does not say: MLX_SNAPKV_ variables and config.toml; `mlx-snapkv config`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from ..errors import SnapKVError
from ..paths import reason

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "MLX_SNAPKV_"
ONE_OF = {"snapkv", "policy"}  # who gives one drops the other that a less specific place has
OWN = {("plan", "memory")}  # no retention, but a size: shared settings pass it over
SECRET = "api_key"

Table = dict[str, Any]  # of config.toml, all its names with underscores


@dataclass(frozen=True)
class Setting:
    """An option's value, and where it is from."""

    value: Any
    origin: str


def config_file() -> Path:
    """Where the file is, if there is one."""
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder) / "mlx-snapkv" / "config.toml"


def settings_of(context: Any) -> dict[str, Setting]:
    """What applies to a command's options unless the command line says otherwise, by parameter.

    Variables go before the file, a command's own table before the keys above it.

    Args:
        context: the command's.

    Raises:
        SnapKVError: the file can't be read, names what is no option, or gives one a wrong value.
    """
    path = _path_of(context)
    options = _options(context.command)
    found: dict[str, Setting] = {}
    for table, place in _places(path, _read(context.find_root().command)):
        given = {name: table[name] for name in options if name in table and name not in found}
        if place in (PREFIX, str(config_file())):
            given = {name: value for name, value in given.items() if (*path, name) not in OWN}
            if "kv_memory" not in options and given.get("policy") == "auto":
                del given["policy"]  # a command that does not choose, such as inspect
        if ONE_OF & set(found):
            given = {name: value for name, value in given.items() if name not in ONE_OF}
        for name, value in given.items():
            key = name.replace("_", "-")
            origin = PREFIX + name.upper() if place == PREFIX else f"{place}, {key}"
            found[name] = Setting(_checked(context, options[name], value, origin), origin)
    return {options[name].name: setting for name, setting in found.items()}


def _places(path: tuple[str, ...], table: Table) -> Iterator[tuple[Table, str]]:
    """Where a command's settings may be, the first to be asked first, with a name for each place."""
    given = {name: value for name, value in os.environ.items() if value and name.startswith(PREFIX)}
    yield {name[len(PREFIX) :].lower(): value for name, value in given.items()}, PREFIX
    places = [(table, str(config_file()))]
    for n, part in enumerate(path, start=1):
        table = table.get(part.replace("-", "_"), {})
        if not isinstance(table, dict):  # a flag by a command's name, such as eval's data
            break
        places.append((table, f"{config_file()}, [{'.'.join(path[:n])}]"))
    yield from reversed(places)


def _read(root: Any) -> Table:
    path = config_file()
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
    except (FileNotFoundError, NotADirectoryError):  # such as a HOME of /dev/null
        return {}
    except (OSError, ValueError) as error:
        raise SnapKVError(f"{path}: {reason(error)}") from error
    return _known(table, root, str(path))


def _known(table: Table, group: Any, place: str) -> Table:
    """The table with underscores in its names; SnapKVError if one is neither an option nor a command there."""
    below = {name.replace("-", "_"): c for name, c in getattr(group, "commands", {}).items()}
    names = {name for _, command in commands_of(group) for name in _options(command)}
    found = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in below and isinstance(value, dict):
            value = _known(value, below[name], f"{place}, [{key}]")
        elif name not in names:
            from ..errors import suggestion

            raise SnapKVError(f"{place}: no option is {key}{suggestion(name, names | set(below))}")
        found[name] = value
    return found


def _checked(context: Any, option: Any, value: Any, origin: str) -> Any:
    """The value as the option takes it from the command line."""
    given = value if isinstance(value, list) else [value]
    if (isinstance(value, list) and not option.multiple) or any(
        not isinstance(each, (str, int, float)) for each in given
    ):
        raise SnapKVError(f"{origin} must be what {option.opts[0]} takes, got {value!r}")
    value = given if option.multiple else value
    try:
        option.process_value(context, value)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        raise SnapKVError(f"{origin}: {error.message}") from error  # type: ignore[attr-defined]
    return value


def commands_of(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command in a group that does something, with the names it is called by."""
    if not hasattr(command, "commands"):
        yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands_of(below, *path, name)


def _options(command: Any) -> dict[str, Any]:
    """A command's options by the names of their flags, with underscores."""
    flags = {option.opts[0]: option for option in command.params if option.name != "help"}
    return {f[2:].replace("-", "_"): option for f, option in flags.items() if f[:2] == "--"}


def _path_of(context: Any) -> tuple[str, ...]:
    """The names by which a command is called, after the program's."""
    parent = context.parent
    return () if parent is None else (*_path_of(parent), context.info_name)


def config(context: typer.Context) -> None:
    """Show the settings that apply, where each is from, and to which commands.

    Any option may be set in ~/.config/mlx-snapkv/config.toml (or XDG_CONFIG_HOME), by the name of its flag, or by a
    variable such as MLX_SNAPKV_MODEL. Keys at the top are for every command that has the flag, a table such as [chat]
    is for one. Flags win over variables, variables over the file; --policy none is the full cache, whatever is set.

    \b
      mlx-snapkv config
      MLX_SNAPKV_MODEL=demo mlx-snapkv generate --prompt "Hello"
    """
    root = context.find_root()
    found: dict[tuple[str, str, str], list[str]] = {}
    for path, command in commands_of(root.command):
        parent: Any = root
        for name in path[:-1]:
            parent = type(context)(parent.command.commands[name], parent=parent, info_name=name)
        below = type(context)(command, parent=parent, info_name=path[-1])
        flags = {option.name: option.opts[0] for option in command.params}
        for name, setting in settings_of(below).items():
            value = "(hidden)" if name == SECRET else repr(setting.value)
            found.setdefault((flags[name], value, setting.origin), []).append(" ".join(path))
    for (flag, value, origin), names in found.items():
        print(f"{flag} {value}, from {origin}: {', '.join(names)}")
    if not found:
        there = "sets nothing" if config_file().exists() else "is not there"
        print(f"{config_file()} {there}, and no {PREFIX} variable is set: options have defaults")
