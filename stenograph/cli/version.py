"""Print the version."""

from __future__ import annotations

from importlib import metadata


def command() -> None:
    try:
        print(f"stenograph {metadata.version('stenograph')}")
    except metadata.PackageNotFoundError:
        print("stenograph (not installed, run from its source)")
