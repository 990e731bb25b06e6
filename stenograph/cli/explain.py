"""Show every setting, who set it and why. Needs no GPU and no model on disk."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from stenograph.cli.flags import with_options
from stenograph.cli.target import find_target
from stenograph.config import report
from stenograph.config.device import DEVICE_NAMES
from stenograph.config.resolve import ResolutionError, resolve
from stenograph.errors import StenographError

_DEVICES = "|".join(DEVICE_NAMES)


@with_options(skip=("device",))
def command(
    *,
    flags: dict[str, Any],
    config: str | None,
    model_name: str | None = typer.Argument(None, metavar="[MODEL]", help="As --model."),
    preset: str | None = typer.Option(
        None, "--model-preset", metavar="NAME", help="A published model's shape, by name."
    ),
    device: str | None = typer.Option(None, "--device", metavar=_DEVICES, help="The device to resolve for."),
    format: str = typer.Option("table", "--format", metavar="table|json", help="How to print it."),
    changed: bool = typer.Option(False, "--changed", help="Leave out plain defaults."),
) -> None:
    try:
        target = find_target(flags, config, model=model_name, preset=preset, device=device, format=format)
        resolved = resolve(target.options, target.facts, target.device)
    except StenographError as error:
        if format != "json":
            if isinstance(error, ResolutionError):
                _print_all(error)
            raise
        partial = report.error_json(error) if isinstance(error, ResolutionError) else None
        print(json.dumps(partial or {"settings": {}, "warnings": [], "errors": [str(error)]}, indent=2))
        sys.exit(2)
    if format == "json":
        print(json.dumps(report.as_json(resolved, changed=changed), indent=2))
    else:
        print(report.table(resolved, changed=changed))


def _print_all(error: ResolutionError) -> None:
    """All conflicts but the first, which the entry point prints."""
    for other in error.errors[1:]:
        print(f"steno: {other}", file=sys.stderr)
