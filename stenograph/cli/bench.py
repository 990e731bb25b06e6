"""Measure speed."""

from __future__ import annotations

from typing import Any

import typer

from stenograph.cli.flags import read_options, with_options
from stenograph.config.options import OPTIONS
from stenograph.errors import ConfigError

app = typer.Typer(help="Measure speed: a table for people, then one JSON line for machines.", no_args_is_help=True)


@app.command(help="Streams side by side from short prompts: tokens a second, bandwidth used, transformers beside it.")
@with_options()
def decode(
    *,
    flags: dict[str, Any],
    config: str | None,
    streams: str = typer.Option("1,8,16,32", "--streams", help="How many streams, a list."),
    input_len: int = typer.Option(32, "--input-len", help="Prompt tokens.", min=1),
    output_len: int = typer.Option(128, "--output-len", help="Answer tokens.", min=1),
    repeats: int = typer.Option(3, "--repeats", help="The best of so many runs counts.", min=1),
    compare: bool = typer.Option(False, "--compare", help="Run transformers' generate beside it, in turn."),
) -> None:
    options = read_options(flags, config).set_values()
    from stenograph.bench import decode as bench

    bench.run(
        options,
        streams=_numbers("--streams", streams),
        input_len=input_len,
        output_len=output_len,
        repeats=repeats,
        compare=compare,
    )


@app.command(help="Whole workloads through the offline API: D1, D32, P, W1, W1T (see docs/performance.md).")
@with_options()
def offline(
    *,
    flags: dict[str, Any],
    config: str | None,
    workloads: str = typer.Option("d1,d32,p", "--workloads", help="Names, a list: d1, d32, p, w1, w1t."),
    requests: int | None = typer.Option(None, "--requests", help="Another number of requests each.", min=1),
) -> None:
    from stenograph.bench.workloads import NAMES

    names = [name.strip().lower() for name in workloads.split(",")]
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"--workloads names {name!r}.", remedy=f"Known: {', '.join(NAMES)}.")
    options = read_options(flags, config).set_values()
    from stenograph.bench import offline as bench

    bench.run(options, workloads=names, requests=requests)


@app.command(help="Requests at a rate over HTTP: time to first token and between tokens. Starts a server, or --url.")
@with_options()
def serve(
    *,
    flags: dict[str, Any],
    config: str | None,
    url: str | None = typer.Option(None, "--url", help="A server that runs already, such as http://127.0.0.1:8000."),
    rate: float = typer.Option(4.0, "--rate", help="Requests a second.", min=0.001),
    requests: int = typer.Option(64, "--requests", help="How many in all.", min=1),
    input_len: int = typer.Option(128, "--input-len", help="Prompt tokens.", min=1),
    output_len: int = typer.Option(64, "--output-len", help="Answer tokens.", min=1),
) -> None:
    read_options(flags, config)
    from stenograph.bench import serve as bench

    given = ["--config", config] if config else []
    for name, value in flags.items():
        flag = OPTIONS[name].flag
        if isinstance(value, bool):
            given.append(flag if value else f"--no-{flag[2:]}")
        else:
            given += [flag, str(value)]
    bench.run(given, url=url, rate=rate, requests=requests, input_len=input_len, output_len=output_len)


def _numbers(flag: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{flag} is {text!r}.", remedy="Give positive whole numbers, such as 1,8,16.")
    return numbers
