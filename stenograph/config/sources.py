"""Where options come from: flags over `STENOGRAPH_*` variables over a YAML file over Python arguments over defaults.

Nothing is ignored: what is unknown or unreadable is a `ConfigError` that names the nearest valid thing.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stenograph.config.options import OPTIONS, Asked, EngineOptions, Option, unknown_option
from stenograph.errors import ConfigError

PREFIX: Final = "STENOGRAPH_"
NOT_OPTIONS: Final = frozenset({"STENOGRAPH_CONFIG", "STENOGRAPH_CACHE"})
"""Variables of ours that are no engine options: the settings file, and where the demo model is kept."""

Layer = Mapping[str, Asked]
"""One source's values by option name. A value of None says: back to the rules."""


def read_environment(environment: Mapping[str, str] | None = None) -> dict[str, Asked]:
    """Options from `STENOGRAPH_*` variables. An empty one counts as unset."""
    found = {}
    for variable, text in (os.environ if environment is None else environment).items():
        if not variable.startswith(PREFIX) or variable in NOT_OPTIONS:
            continue
        option = OPTIONS.get(variable[len(PREFIX) :].lower())
        if option is None or option.variable != variable:
            known = {o.variable: o.variable for o in OPTIONS.values()} | {name: name for name in NOT_OPTIONS}
            raise unknown_option(variable, kind="environment variable", spell=known)
        if text.strip():
            value = _reading(f"environment variable {variable}", option, text)
            found[option.name] = Asked(value=value, source="env", detail=variable)
    return found


def read_file(path: str | os.PathLike[str]) -> dict[str, Asked]:
    """Options from a YAML file: one mapping from option names (with _ or -) to values."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"cannot read the settings file {path}: {reason}.", remedy="Check --config.") from None
    try:
        content = _load(text)
    except ConfigError as error:
        raise ConfigError(f"the settings file {path}: {error.message}", remedy=error.remedy) from None
    except _yaml().YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise ConfigError(f"the settings file {path} cannot be read:{where} {problem}.") from None
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # the library's words for a value of no sense
        raise ConfigError(f"the settings file {path} cannot be read: {error}.") from None
    except RecursionError:
        raise ConfigError(f"the settings file {path} is nested too deeply.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"the settings file {path} holds no mapping.", remedy="Write lines such as page_size: 16.")
    found: dict[str, Asked] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in OPTIONS:
            raise unknown_option(str(key), kind=f"key in {path}:")
        if name in found:
            raise ConfigError(f"the settings file {path} sets {name} twice.", remedy="Remove one of the two.")
        found[name] = Asked(value=_reading(f"{path}", OPTIONS[name], value), source="file", detail=str(path))
    return found


def read_flags(flags: Mapping[str, Any], *, spelled: Mapping[str, str] | None = None) -> dict[str, Asked]:
    """Options from the command line: texts, or for switches booleans. `spelled` tells flags of another name."""
    found = {}
    for name, text in flags.items():
        option = OPTIONS[name]
        value = option.parse(text) if isinstance(text, str) else option.check(text)
        found[name] = Asked(value=value, source="flag", detail=(spelled or {}).get(name, option.flag))
    return found


def read_python(values: Mapping[str, Any]) -> dict[str, Asked]:
    """Options from keyword arguments, which have their types already."""
    for name in values:
        if name not in OPTIONS:
            raise unknown_option(name)
    return {name: Asked(value=OPTIONS[name].check(value), source="python") for name, value in values.items()}


def merge(*layers: Layer) -> EngineOptions:
    """Options from layers, lowest first; a higher layer's value wins, and the trail keeps all of them."""
    values: dict[str, Any] = {}
    trail: dict[str, tuple[Asked, ...]] = {}
    for layer in layers:
        for name, asked in layer.items():
            values[name] = asked.value
            trail[name] = (*trail.get(name, ()), asked)
    return EngineOptions(**values, asked=trail)


def gather(
    flags: Mapping[str, Any],
    *,
    config: str | None = None,
    environment: Mapping[str, str] | None = None,
    spelled: Mapping[str, str] | None = None,
    python: Mapping[str, Any] | None = None,
) -> EngineOptions:
    """Everything that a command, or a program (`python`: its arguments), was told.

    `config` is the --config file, else STENOGRAPH_CONFIG names it.
    """
    environment = os.environ if environment is None else environment
    path = config or environment.get("STENOGRAPH_CONFIG", "").strip()
    file = read_file(path) if path else {}
    return merge(read_python(python or {}), file, read_environment(environment), read_flags(flags, spelled=spelled))


def _reading(where: str, option: Option, value: Any) -> Any:
    try:
        return option.parse(value) if isinstance(value, str) else option.check(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", remedy=error.remedy) from None


def _yaml() -> Any:
    """The YAML library, imported only when there is a file to read."""
    return importlib.import_module("yaml")


def _load(text: str) -> Any:
    """The content of a YAML text; a key given twice is an error, where YAML libraries silently keep the last."""
    yaml = _yaml()
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            keys = [str(key.value) for key, _ in root.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigError(f"{key} is set twice.", remedy="Remove one of the two.")
        return None if root is None else loader.construct_document(root)
    finally:
        loader.dispose()
