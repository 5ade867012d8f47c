"""Read option values from MLX_SNAPKV_ variables and config.toml. `mlx-snapkv config` shows them."""

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
# Options that determine a request's setting. The most specific source (see `_sources_by_precedence`) that sets any of
# them determines all three.
SETTING_OPTIONS = {"snapkv", "policy", "sparse"}
SECRET = "api_key"
# Names (without `PREFIX`) of variables that set no option: the path of the speed record, and the folder with models for
# tests.
NO_OPTIONS = {"speed_record", "real_models"}

Table = dict[str, Any]  # a table of config.toml; `_checked_table` replaces the hyphens in its keys


class ConfigValue(NamedTuple):
    """An option's value and its origin, such as an environment variable or a key in config.toml."""

    value: Any
    origin: str


def config_file() -> Path:
    """Return the path of config.toml, which need not exist.

    It is mlx-snapkv/config.toml in the folder named by XDG_CONFIG_HOME or, by default, in ~/.config.
    """
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder) / "mlx-snapkv" / "config.toml"


def config_values(context: Any) -> dict[str, ConfigValue]:
    """Return the configured values of a command's options, keyed by parameter name.

    Print a warning for every MLX_SNAPKV_ variable that matches no option.

    Raises: SnapKVError: config.toml can't be read, or has an unknown key or an invalid value.
    """
    command_path: tuple[str, ...] = ()
    root = context
    while root.parent is not None:
        command_path = (root.info_name, *command_path)
        root = root.parent
    _warn_of_unknown_variables(root.command)
    table = _read_config_file(root.command)
    return _merge_sources(context.command, command_path, table)


def _warn_of_unknown_variables(root: Any) -> None:
    """Print a warning for every MLX_SNAPKV_ variable that matches no option of any command."""
    variables = {name: value for name, value in _variables().items() if name not in NO_OPTIONS}
    if not variables:  # the usual case: no need to collect the options
        return
    options = _options_in(root)
    for name, variable in variables.items():
        if name not in options:
            warning = f"{variable.origin} names no option{suggestion(name, options)}"
            print(f"warning: {warning}", file=sys.stderr)


def _merge_sources(
    command: Any, command_path: tuple[str, ...], table: Table
) -> dict[str, ConfigValue]:
    """Return the configured values for the command at `command_path`, keyed by parameter name.

    The most specific source of an option wins. The most specific source that sets any of `SETTING_OPTIONS` determines
    all three.

    Args:
        command: command whose options are looked up.
        command_path: names of the groups that contain the command, then its own name.
        table: the whole config.toml.
    """
    options = _options_of(command)
    supports_auto = "kv_memory" in options  # only commands that support auto have this option
    values_by_flag: dict[str, ConfigValue] = {}
    for source in _sources_by_precedence(command_path, table, supports_auto):
        has_setting = any(name in values_by_flag for name in SETTING_OPTIONS)
        for name, (value, origin) in source.items():
            is_overridden = name in values_by_flag or (has_setting and name in SETTING_OPTIONS)
            if name not in options or is_overridden:
                continue
            if options[name].multiple and not isinstance(value, list):
                value = [value]
            values_by_flag[name] = ConfigValue(value, origin)
    return {
        option.name: values_by_flag[name]
        for name, option in options.items()
        if name in values_by_flag
    }


def _sources_by_precedence(
    command_path: tuple[str, ...], table: Table, supports_auto: bool
) -> list[dict[str, ConfigValue]]:
    """Return the values of each source, most specific first.

    The order is: environment variables, the command's table, then the enclosing tables.

    Args:
        command_path: names of the groups that contain the command, then its own name.
        table: the whole config.toml.
        supports_auto: whether the command supports the policy "auto". If not, "auto" is omitted from the sources that
            all commands share: environment variables, and config.toml's top-level keys.
    """
    variables = _variables()
    top_values = _values_in(table, str(config_file()))
    for shared_values in (variables, top_values):
        policy = shared_values.get("policy")
        if policy is not None and policy.value == "auto" and not supports_auto:
            del shared_values["policy"]
    tables = [top_values]
    for depth, command_name in enumerate(command_path, start=1):
        table = table.get(command_name.replace("-", "_"), {})
        table_name = ".".join(command_path[:depth])
        tables.append(_values_in(table, f"{config_file()}, [{table_name}]"))
    return [variables, *reversed(tables)]


def _variables() -> dict[str, ConfigValue]:
    """Return the values of all non-empty MLX_SNAPKV_ variables, keyed by the rest of the name in lower case."""
    return {
        name.removeprefix(PREFIX).lower(): ConfigValue(value, origin=name)
        for name, value in os.environ.items()
        if value and name.startswith(PREFIX)
    }


def _values_in(table: Table, location: str) -> dict[str, ConfigValue]:
    """Return a table's values with their origins. `location` names the file and the table."""
    return {
        name: ConfigValue(value, origin=f"{location}, {name.replace('_', '-')}")
        for name, value in table.items()
    }


def _read_config_file(root: Any) -> Table:
    """Read and check config.toml. Return an empty table if it does not exist.

    Raises: SnapKVError: the file can't be read, is not valid TOML, or is rejected by `_checked_table`.
    """
    path = config_file()
    try:
        with path.open("rb") as stream:
            table = tomllib.load(stream)
    except (FileNotFoundError, NotADirectoryError):  # HOME may be /dev/null
        return {}
    except (OSError, ValueError) as error:
        raise SnapKVError(f"{path}: {reason(error)}") from error
    return _checked_table(table, root, str(path))


def _checked_table(table: Table, group: Any, location: str) -> Table:
    """Check a table of config.toml, and return it with underscores instead of hyphens in its keys.

    Args:
        table: the table as parsed from TOML.
        group: the command or group that the table applies to.
        location: prefix for error messages.

    Raises: SnapKVError: a name is neither an option nor a command of the group, an option's value is a table, or it is
        a list but the option is not repeatable.
    """
    subcommands = {
        name.replace("-", "_"): command for name, command in getattr(group, "commands", {}).items()
    }
    # A group's table may set options of any command in the group.
    options = _options_in(group)
    checked_values = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        is_subtable = name in subcommands and isinstance(value, dict)
        if is_subtable:
            value = _checked_table(value, subcommands[name], f"{location}, [{key}]")
        elif name not in options:
            raise SnapKVError(
                f"{location}: unknown option {key}{suggestion(name, {*options, *subcommands})}"
            )
        elif isinstance(value, dict) or (isinstance(value, list) and not options[name].multiple):
            flag = options[name].opts[0]
            raise SnapKVError(f"{location}, {key} must be a value that {flag} takes, got {value!r}")
        checked_values[name] = value
    return checked_values


def commands_of(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, command) for every command in a group and its subgroups, or for a single command."""
    is_group = hasattr(command, "commands")
    if not is_group:
        yield path, command
        return
    for name, subcommand in command.commands.items():
        yield from commands_of(subcommand, *path, name)


def _options_in(group: Any) -> dict[str, Any]:
    """Return the options of all commands in a group, keyed as in `_options_of`."""
    options: dict[str, Any] = {}
    for _, command in commands_of(group):
        options |= _options_of(command)
    return options


def _options_of(command: Any) -> dict[str, Any]:
    """Return a command's options except --help, keyed by flag name, with underscores instead of hyphens."""
    options = {}
    for option in command.params:
        flag = option.opts[0]
        is_flag = flag.startswith("--")  # arguments have no flag
        if is_flag and option.name != "help":
            options[flag.removeprefix("--").replace("-", "_")] = option
    return options


def config(context: typer.Context) -> None:
    r"""Show the settings in effect: where each comes from, and which commands it applies to.

    Any option can be set in ~/.config/mlx-snapkv/config.toml (or in XDG_CONFIG_HOME) under its flag's name, or by a
    variable such as MLX_SNAPKV_MODEL. Keys at the top apply to every command that has the flag; a table such as [chat]
    applies to one command. Flags override variables, and variables override the file. --policy none always means the
    full cache.

    \b
      mlx-snapkv config
      MLX_SNAPKV_MODEL=demo mlx-snapkv generate --prompt "Hello"
    """
    root: Any = context.find_root().command
    table = _read_config_file(root)
    commands_by_setting: dict[str, list[str]] = {}
    for path, command in commands_of(root):
        flags = {option.name: option.opts[0] for option in command.params}
        for name, (value, origin) in _merge_sources(command, path, table).items():
            value_text = "(hidden)" if name == SECRET else repr(value)
            setting = f"{flags[name]} {value_text}, from {origin}"
            commands_by_setting.setdefault(setting, []).append(" ".join(path))
    for setting, command_names in commands_by_setting.items():
        print(f"{setting}: {', '.join(command_names)}")
    if not commands_by_setting:
        file_state = "sets nothing" if config_file().exists() else "does not exist"
        print(f"{config_file()} {file_state}, and no {PREFIX} variable is set: the defaults apply")
