"""Measure speed."""

from __future__ import annotations

import typer

app = typer.Typer(help="Measure speed: a table for people, then one JSON line for machines.", no_args_is_help=True)
