"""Print the version."""

from __future__ import annotations

import stenograph


def command() -> None:
    print(f"stenograph {stenograph.__version__}")
