"""Command-line flags out of the options' declarations: each option is declared once, in config/options.py."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import typer

from stenograph.config.options import OPTIONS, EngineOptions, Option
from stenograph.config.sources import gather
from stenograph.errors import ConfigError


def with_options(*, skip: tuple[str, ...] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command a flag for every option (but those in `skip`) and --config; it gets them as `flags` and
    `config`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            p
            for p in inspect.signature(command, eval_str=True).parameters.values()
            if p.name not in ("flags", "config")
        ]
        names = [name for name in OPTIONS if name not in skip]

        def run(**values: Any) -> None:
            flags = {name: value for name in names if (value := values.pop(name)) is not None}
            command(flags=flags, config=values.pop("config"), **values)

        file = typer.Option(None, "--config", metavar="FILE", help="YAML file of options; flags go before it.")
        config = _parameter("config", str | None, file)
        run.__signature__ = inspect.Signature([*own, config, *(_flag(OPTIONS[name]) for name in names)])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in run.__signature__.parameters.values()}  # type: ignore[attr-defined]
        run.__name__ = command.__name__
        return run

    return decorate


def read_options(
    flags: Mapping[str, Any],
    config: str | None,
    *,
    model: str | None = None,
    spelled: str = "the positional model",
    quiet: bool = False,
) -> EngineOptions:
    """Options from flags, environment and file, with logging set up as they say. `model` overrides --model, as the
    argument that `spelled` names. `quiet` logs warnings alone, unless a log level is set."""
    given = dict(flags)
    if model is not None:
        if given.get("model", model) != model:
            raise ConfigError(f"two models: {model} and --model {given['model']}.", remedy="Name one of them.")
        given["model"] = model
    options = gather(given, config=config, spelled={"model": spelled} if model is not None else None)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    level = "warning" if quiet and not options.is_set("log_level") else options.log_level
    logging.getLogger("stenograph").setLevel(level.upper())
    return options


def _flag(option: Option) -> inspect.Parameter:
    default = option.auto or ("none" if option.default is None else str(option.default).lower())
    help = f"{option.help} [{default}]"
    panel = option.group.capitalize()
    if option.kind == "bool":
        spelled = f"{option.flag}/--no-{option.flag[2:]}"
        return _parameter(
            option.name, bool | None, typer.Option(None, spelled, help=help, rich_help_panel=panel, show_default=False)
        )
    metavar = "|".join(map(str, option.choices)) if option.choices else _METAVAR[option.kind]
    return _parameter(
        option.name, str | None,
        typer.Option(None, option.flag, help=help, metavar=metavar, rich_help_panel=panel, show_default=False),
    )  # fmt: skip


_METAVAR = {"int": "N", "float": "X", "str": "TEXT", "ints": "N,N,..."}


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
