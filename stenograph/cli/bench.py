"""Measure speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from stenograph.bench.workloads import NAMES
from stenograph.cli.flags import read_options, with_options
from stenograph.config.options import OPTIONS
from stenograph.errors import ConfigError

app = typer.Typer(help="Measure speed: a table for people, then one JSON line for machines.", no_args_is_help=True)


@app.command(name="decode", help="Tokens a second of 1, 8 ... requests decoding together, with bandwidth used.")
@with_options()
def decode(
    *,
    flags: dict[str, Any],
    config: str | None,
    streams: str = typer.Option("1,8,16,32", "--streams", metavar="N,N,...", help="Requests that run together."),
    input_len: int = typer.Option(32, "--input-len", min=1, help="Prompt tokens a request."),
    output_len: int = typer.Option(128, "--output-len", min=1, help="Answer tokens a request."),
    repeats: int = typer.Option(3, "--repeats", min=1, help="Runs of each; the best one counts."),
    compare: bool = typer.Option(False, "--compare", help="Run transformers' generate beside it."),
) -> None:
    options = read_options(flags, config, quiet=True)
    from stenograph.bench.decode import run

    run(
        options,
        streams=_counts("--streams", streams),
        input_len=input_len,
        output_len=output_len,
        repeats=repeats,
        compare=compare,
    )


@app.command(name="offline", help="Tokens a second of whole workloads through LLM.generate.")
@with_options()
def offline(
    *,
    flags: dict[str, Any],
    config: str | None,
    workloads: str = typer.Option("d1,d32,p", "--workloads", metavar="NAME,...", help="Of d1, d32, p, w1, w1t."),
    requests: int | None = typer.Option(
        None, "--requests", min=1, help="Requests of each, in place of its own number."
    ),
) -> None:
    options = read_options(flags, config, quiet=True)
    names = _names("--workloads", workloads, NAMES)
    from stenograph.bench.offline import run

    run(options, workloads=names, requests=requests)


@app.command(name="serve", help="Time to the first token, and between chunks, of requests that arrive at a rate.")
@with_options()
def serve(
    *,
    flags: dict[str, Any],
    config: str | None,
    url: str | None = typer.Option(None, "--url", help="A running server; else one is started."),
    rate: float = typer.Option(4.0, "--rate", min=0.001, help="Requests a second."),
    requests: int = typer.Option(64, "--requests", min=1, help="Requests in all."),
    input_len: int = typer.Option(128, "--input-len", min=1, help="Prompt tokens a request."),
    output_len: int = typer.Option(64, "--output-len", min=1, help="Answer tokens a request."),
) -> None:
    read_options(flags, config, quiet=True)  # errors show here, not in the server's process
    from stenograph.bench.serve import run

    run(_spelled(flags, config), url=url, rate=rate, requests=requests, input_len=input_len, output_len=output_len)


def _spelled(flags: dict[str, Any], config: str | None) -> list[str]:
    """The flags as they were typed, for a server of our own."""
    words = ["--config", config] if config else []
    for name, value in flags.items():
        flag = OPTIONS[name].flag
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, value]
    return words


def _names(flag: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(text.replace(",", " ").lower().split())
    if not names or not set(names) <= set(known):
        raise ConfigError(f"{flag} is {text!r}; it must be of {', '.join(known)}.")
    return names


def _counts(flag: str, text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise ConfigError(f"{flag} is {text!r}; it must be counts such as 1,8,16.")
    return counts
