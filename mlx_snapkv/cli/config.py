"""What options are where the command line does not say: MLX_SNAPKV_ variables and config.toml; `mlx-snapkv config`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from ..errors import SnapKVError, suggestion
from ..paths import reason

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "MLX_SNAPKV_"
# One of these replaces another from a less specific place.
ONE_OF = {"snapkv", "policy", "sparse"}
SECRET = "api_key"

Table = dict[str, Any]  # of config.toml, all its names with underscores


class Setting(NamedTuple):
    """An option's value that the command line does not give, and where it is from: a variable or a file."""

    value: Any
    origin: str


def config_file() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder) / "mlx-snapkv" / "config.toml"


def settings_of(context: Any) -> dict[str, Setting]:
    """Return the settings of a command's options, by parameter; the command line goes before them."""
    path: tuple[str, ...] = ()
    parent = context
    while parent.parent is not None:
        path, parent = (parent.info_name, *path), parent.parent
    return _settings(context.command, path, _read(parent.command))


def _settings(command: Any, path: tuple[str, ...], table: Table) -> dict[str, Setting]:
    """Return a command's settings. Variables go before the file, its own table before the keys above that."""
    options, settings = _options(command), dict[str, Setting]()
    variables = {
        name[len(PREFIX) :].lower(): value
        for name, value in os.environ.items()
        if value and name.startswith(PREFIX)
    }
    places = [(table, f"{config_file()}, ", True)]  # with a name for each, and whether all share it
    for n, part in enumerate(path, start=1):
        table = table.get(part.replace("-", "_"), {})
        places.append((table, f"{config_file()}, [{'.'.join(path[:n])}], ", False))
    for values, place, is_shared in [(variables, PREFIX, True), *reversed(places)]:
        passed_over = ONE_OF if ONE_OF & settings.keys() else set()
        for name in options.keys() & values.keys() - settings.keys() - passed_over:
            value = values[name]
            chooses = "kv_memory" in options or (name, value) != ("policy", "auto")
            if is_shared and not chooses:
                continue
            key = name.upper() if values is variables else name.replace("_", "-")
            as_list = options[name].multiple and not isinstance(value, list)
            settings[name] = Setting([value] if as_list else value, place + key)
    return {option.name: settings[name] for name, option in options.items() if name in settings}


def _read(root: Any) -> Table:
    path = config_file()
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
    except (FileNotFoundError, NotADirectoryError):  # such as a HOME of /dev/null
        return {}
    except (OSError, ValueError) as error:
        raise SnapKVError(f"{path}: {reason(error)}") from error
    return _checked(table, root, str(path))


def _checked(table: Table, group: Any, place: str) -> Table:
    """Return the table with underscores in its names.

    Raises: SnapKVError: a name is neither an option nor a command there.
    """
    below = {name.replace("-", "_"): c for name, c in getattr(group, "commands", {}).items()}
    options: dict[str, Any] = {}
    for _, command in commands_of(group):
        options |= _options(command)
    checked = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in below and isinstance(value, dict):
            value = _checked(value, below[name], f"{place}, [{key}]")
        elif name not in options:
            raise SnapKVError(
                f"{place}: unknown option {key}{suggestion(name, {*options, *below})}"
            )
        elif isinstance(value, dict) or (isinstance(value, list) and not options[name].multiple):
            flag = options[name].opts[0]
            raise SnapKVError(f"{place}, {key} must be a value that {flag} takes, got {value!r}")
        checked[name] = value
    return checked


def commands_of(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command in a group that does something, with the names that it is called by."""
    if not hasattr(command, "commands"):
        yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands_of(below, *path, name)


def _options(command: Any) -> dict[str, Any]:
    flags = {option.opts[0]: option for option in command.params if option.name != "help"}
    return {f[2:].replace("-", "_"): option for f, option in flags.items() if f[:2] == "--"}


def config(context: typer.Context) -> None:
    """Show the settings in effect: where each comes from, and which commands it applies to.

    Any option can be set in ~/.config/mlx-snapkv/config.toml (or in XDG_CONFIG_HOME) under its flag's name, or by a
    variable such as MLX_SNAPKV_MODEL. Keys at the top apply to every command that has the flag; a table such as [chat]
    applies to one command. Flags override variables, and variables override the file. --policy none always means the
    full cache.

    \b
      mlx-snapkv config
      MLX_SNAPKV_MODEL=demo mlx-snapkv generate --prompt "Hello"
    """
    root: Any = context.find_root().command
    table = _read(root)
    commands: dict[tuple[str, str, str], list[str]] = {}
    for path, command in commands_of(root):
        flags = {option.name: option.opts[0] for option in command.params}
        for name, setting in _settings(command, path, table).items():
            value = "(hidden)" if name == SECRET else repr(setting.value)
            commands.setdefault((flags[name], value, setting.origin), []).append(" ".join(path))
    for (flag, value, origin), names in commands.items():
        print(f"{flag} {value}, from {origin}: {', '.join(names)}")
    if not commands:
        there = "sets nothing" if config_file().exists() else "does not exist"
        print(f"{config_file()} {there}, and no {PREFIX} variable is set: the defaults apply")
