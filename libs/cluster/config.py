"""Settings of a process from its command line, environment and TOML file, checked against a dataclass.

A flag goes before the environment, the environment before the file, the file before the field's default.
The dataclass is all there is to say about a setting:

    step_tokens_max: int = field(default=512, metadata={"help": "...", "min": 16, "max": 65536})

is `--step-tokens-max`, MOONPOOL_STEP_TOKENS_MAX and `step_tokens_max` in the file's tables `[common]` and
`[<role>]`. Metadata may hold `help`, `min`, `max` and `choices`. Types: str, int, float, bool and tuples of
str, separated by commas; each also with `| None`. Unknown flags and keys of the file fail by name; unknown
MOONPOOL_ variables do not, because roles that share an environment have different settings.
"""

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from cluster.errors import ConfigError
from policy.core import Role

ENVIRONMENT_PREFIX = "MOONPOOL_"
CONFIG_FLAG = "--config"
CONFIG_VARIABLE = "MOONPOOL_CONFIG"
COMMON_TABLE = "common"
SHOWN_CHARS_MAX = 64
"""Of a wrong value in an error."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

ConfigT = TypeVar("ConfigT")


class HelpRequested(Exception):
    """No error: the command line asks for help; the text is `str(self)`."""


def load_config(
    config_class: type[ConfigT],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    role: str,
    toml_path: Path | None = None,
) -> ConfigT:
    """`toml_path` is the file where neither `--config` nor MOONPOOL_CONFIG names one.

    Raises ConfigError, naming setting and limit; HelpRequested for `--help` or `-h`.
    """
    if not {"-h", "--help"}.isdisjoint(argv):
        raise HelpRequested(help_text(config_class, role))
    settings = settings_of(config_class)
    flags, config_path = _from_flags(settings, argv, role)
    path = config_path or environ.get(CONFIG_VARIABLE) or toml_path
    values: dict[str, Any] = {}
    values.update(_from_file(settings, Path(path), role) if path else {})
    values.update(_from_environment(settings, environ))
    values.update(flags)
    missing = sorted(name for name, setting in settings.items() if setting.required and name not in values)
    if missing:
        raise ConfigError(f"{_flag(missing[0])} is required")
    return config_class(**values)


def help_text(config_class: type[object], role: str) -> str:
    """Every setting with its default and its name in the environment."""
    lines = [
        f"usage: python -m {role} [--setting VALUE]...",
        "",
        f"  {CONFIG_FLAG} PATH",
        f"        TOML file with tables [{COMMON_TABLE}] and [{role}] [environment: {CONFIG_VARIABLE}]",
    ]
    for name, setting in settings_of(config_class).items():
        lines.append(f"  {_flag(name)} {setting.value_name}".rstrip())
        lines.append(f"        {setting.describe()}")
    return "\n".join(lines)


class Setting:
    """One field of a config class: how its value is read and checked."""

    def __init__(self, declared: "Field[Any]", kind: object) -> None:
        kinds = [one for one in get_args(kind) if one is not NoneType] if isinstance(kind, UnionType) else []
        kind = kinds[0] if len(kinds) == 1 else kind
        if kind not in (str, int, float, bool, tuple[str, ...]):
            raise TypeError(f"{declared.name}: a setting cannot be of type {kind}")
        self.name = declared.name
        self.kind = kind
        self.help: str = declared.metadata.get("help", "")
        self.minimum: float | None = declared.metadata.get("min")
        self.maximum: float | None = declared.metadata.get("max")
        self.choices: Sequence[str] = declared.metadata.get("choices", ())
        self.default = declared.default
        self.required = declared.default is MISSING and declared.default_factory is MISSING

    @property
    def value_name(self) -> str:
        if self.kind is bool:
            return f"| {_flag(self.name, 'no-')}"
        return {str: "TEXT", int: "INTEGER", float: "NUMBER"}.get(self.kind, "A,B,...")

    def describe(self) -> str:
        default = "required" if self.required else f"default: {self._shown_default()}"
        limits = f"; {self.limits()}" if self.limits() else ""
        return f"{self.help} [{default}{limits}; environment: {_variable(self.name)}]".strip()

    def parse(self, text: str, where: str) -> Any:
        """The value that `text` spells, from a flag or the environment."""
        if self.kind is str:
            return self.check(text, where)
        if self.kind is bool:
            lowered = text.strip().lower()
            if lowered not in _TRUE | _FALSE:
                raise ConfigError(f"{where}: {shown(text)} is not true or false")
            return lowered in _TRUE
        if self.kind in (int, float):
            return self.check(_number(self.kind, text, where), where)
        return tuple(part.strip() for part in text.split(",") if part.strip())

    def check(self, value: object, where: str) -> Any:
        """`value` as this setting's type and within its limits."""
        if self.kind is float and type(value) is int:
            value = _float(value)
        if self.kind == tuple[str, ...]:
            if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
                raise ConfigError(f"{where}: {shown(value)} is not a list of strings")
            return tuple(value)
        if type(value) is not self.kind:
            wanted = {str: "text", int: "an integer", float: "a number", bool: "true or false"}[self.kind]
            raise ConfigError(f"{where}: {shown(value)} is not {wanted}")
        self._check_limits(value, where)
        return value

    def _check_limits(self, value: object, where: str) -> None:
        if self.choices and value not in self.choices:
            raise ConfigError(f"{where}: {shown(value)} is not {self.limits()}")
        if isinstance(value, int | float):
            low = self.minimum if self.minimum is not None else -math.inf
            high = self.maximum if self.maximum is not None else math.inf
            # Integers of any length compare, but not all of them are a float: so no isfinite.
            if not low <= value <= high or value in (math.inf, -math.inf):
                raise ConfigError(f"{where}: {shown(value)} is not {self.limits() or 'a finite number'}")

    def limits(self) -> str:
        """What values are allowed, in words; empty where its type says it all."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.minimum is not None and self.maximum is not None:
            return f"from {self.minimum} to {self.maximum}"
        if self.minimum is not None:
            return f"at least {self.minimum}"
        if self.maximum is not None:
            return f"at most {self.maximum}"
        return ""

    def _shown_default(self) -> str:
        if self.default is MISSING or self.default in ("", ()):
            return "none"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return str(self.default)


def settings_of(config_class: type[object]) -> dict[str, Setting]:
    """By name, in the order of the class."""
    hints = get_type_hints(config_class)
    declared: Iterable[Field[Any]] = fields(config_class)  # type: ignore[arg-type]
    return {one.name: Setting(one, hints[one.name]) for one in declared}


def _from_flags(
    settings: Mapping[str, Setting], argv: Sequence[str], role: str
) -> tuple[dict[str, Any], str | None]:
    """The values and the path that `--config` names. Both `--name value` and `--name=value`."""
    values: dict[str, Any] = {}
    config_path: str | None = None
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, has_value, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else ""
        positive = name.removeprefix("no_")
        if flag == CONFIG_FLAG:
            config_path = value if has_value else _next(rest, flag)
        elif name in settings and settings[name].kind is bool:
            values[name] = settings[name].parse(value, flag) if has_value else True
        elif name in settings:
            values[name] = settings[name].parse(value if has_value else _next(rest, flag), flag)
        elif positive in settings and settings[positive].kind is bool and not has_value:
            values[positive] = False
        else:
            raise ConfigError(f"unknown argument {flag!r} for {role}{hint(flag, map(_flag, settings))}")
    return values, config_path


def _next(rest: list[str], flag: str) -> str:
    if not rest:
        raise ConfigError(f"{flag} needs a value")
    return rest.pop(0)


def _from_environment(settings: Mapping[str, Setting], environ: Mapping[str, str]) -> dict[str, Any]:
    found = {name: environ.get(_variable(name)) for name in settings}
    return {
        name: settings[name].parse(text, _variable(name)) for name, text in found.items() if text is not None
    }


def _from_file(settings: Mapping[str, Setting], path: Path, role: str) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    tables = (COMMON_TABLE, *Role)
    for key, value in document.items():
        if key not in tables and not isinstance(value, dict):
            raise ConfigError(
                f"config file {path}: {key} stands outside a table: put it under [{COMMON_TABLE}]"
            )
        if key not in tables or not isinstance(value, dict):
            raise ConfigError(f"config file {path}: {key} is not one of the tables {', '.join(tables)}")
    values: dict[str, Any] = {}
    for table in (COMMON_TABLE, role):
        entries = document.get(table, {})
        for key, value in entries.items():
            where = f"config file {path}: [{table}] {key}"
            if key not in settings:
                raise ConfigError(f"{where} is unknown{hint(key, settings)}")
            values[key] = settings[key].check(value, where)
    return values


def _number(kind: object, text: str, where: str) -> int | float:
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        wanted = "an integer" if kind is int else "a number"
        raise ConfigError(f"{where}: {shown(text)} is not {wanted}") from None


def _float(value: int) -> float:
    """Infinite where it is beyond what a float can be."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def shown(value: object) -> str:
    """For an error, which is one line that can be read, whatever somebody set."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}… ({len(text)} characters)"


def hint(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name."""
    close = get_close_matches(name, list(known), n=1)
    return f": did you mean {close[0]}?" if close else ""


def _flag(name: str, prefix: str = "") -> str:
    return f"--{prefix}{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"
