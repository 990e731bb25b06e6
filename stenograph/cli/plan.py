"""Plan a model's memory on a device, without the device: weights, KV cache, activations, what fits."""

from __future__ import annotations

import json
import sys
from typing import Any

import typer

from stenograph.cli.flags import with_options
from stenograph.cli.target import find_target
from stenograph.config import plan
from stenograph.config.device import DEVICE_NAMES
from stenograph.config.resolve import resolve
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
    device: str | None = typer.Option(None, "--device", metavar=_DEVICES, help="The device to plan for."),
    format: str = typer.Option("table", "--format", metavar="table|json", help="How to print it."),
) -> None:
    try:
        target = find_target(flags, config, model=model_name, preset=preset, device=device, format=format)
        resolved = resolve(target.options, target.facts, target.device)
        planned = plan.plan_memory(resolved)
    except StenographError as error:
        if format != "json":
            raise
        print(json.dumps({"plan": None, "warnings": [], "errors": [str(error)]}, indent=2))
        sys.exit(2)
    if format == "json":
        print(json.dumps(plan.as_json(planned, resolved), indent=2))
    else:
        print(plan.table(planned, resolved))
