"""Resolved settings for people (a table) and for machines (the JSON of `steno explain` and `GET /server_info`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from stenograph.config.resolve import ResolutionError, Resolved, Setting, show


def as_json(resolved: Resolved, *, changed: bool = False, errors: Sequence[str] = ()) -> dict[str, Any]:
    """{"settings": {name: {"value", "source", "reason", "asked", "history"}}, "warnings": [], "errors": []}"""
    return {
        "settings": {s.name: _entry(s) for s in rows(resolved, changed=changed)},
        "warnings": list(resolved.warnings),
        "errors": list(errors),
    }


def error_json(error: ResolutionError, *, changed: bool = False) -> dict[str, Any]:
    """The same form for settings in conflict: how far they got, and every conflict."""
    return as_json(error.partial, changed=changed, errors=[str(e) for e in error.errors])


def rows(resolved: Resolved, *, changed: bool = False) -> list[Setting]:
    """All settings, or only those that aren't plain defaults."""
    return [s for s in resolved.settings().values() if s.changed or not changed]


def table(resolved: Resolved, *, changed: bool = False) -> str:
    """One line a setting: name, value, source, reason; then the warnings."""
    cells = [(s.name, show(s.value), s.source, s.reason) for s in rows(resolved, changed=changed)]
    lines = columns([("setting", "value", "source", "reason"), *cells])
    lines += [f"warning: {warning}" for warning in resolved.warnings]
    return "\n".join(lines)


def columns(lines: Iterable[Sequence[str]], *, widest: int = 48) -> list[str]:
    """Lines with their cells in columns; the last column is as wide as it likes."""
    cells = [list(line) for line in lines]
    widths = [min(widest, max(len(line[i]) for line in cells)) for i in range(len(cells[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip()
        for line in cells
    ]


def _entry(setting: Setting) -> dict[str, Any]:
    return {
        "value": setting.value,
        "source": setting.source,
        "reason": setting.reason,
        "asked": setting.asked,
        "history": [step._asdict() for step in setting.history],
    }
