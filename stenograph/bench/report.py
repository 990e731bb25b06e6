"""How a benchmark ends: a table for people, then one JSON line for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def report(title: str, rows: Sequence[Mapping[str, Any]], **context: Any) -> dict[str, Any]:
    """Prints both and returns what the JSON line holds. All rows have the same keys."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    result = {"benchmark": title, **context, "rows": [dict(row) for row in rows]}
    print(json.dumps(result), flush=True)
    return result


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
