"""Serve a model over an OpenAI-compatible HTTP API."""

from __future__ import annotations

from typing import Any

import typer

from stenograph.cli.flags import read_options, with_options
from stenograph.config.device import device_facts
from stenograph.config.report import table
from stenograph.config.resolve import log_warnings, resolve
from stenograph.config.support import check_runnable


@with_options()
def command(
    *,
    flags: dict[str, Any],
    config: str | None,
    model_name: str | None = typer.Argument(None, metavar="[MODEL]", help="As --model."),
    explain: bool = typer.Option(False, "--explain", help="Print the settings that aren't plain defaults, and why."),
) -> None:
    options = read_options(flags, config, model=model_name)
    from stenograph.loading.source import open_model  # heavier, and only a server needs them
    from stenograph.server.launch import serve

    source = open_model(options.model, load_format=options.load_format, trust_remote_code=options.trust_remote_code)
    resolved = resolve(options, source.facts, device_facts(options.device))
    if explain:
        print(table(resolved, changed=True), flush=True)
    check_runnable(resolved)
    log_warnings(resolved)
    serve(resolved, source=source)
