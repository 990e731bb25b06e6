"""docs/settings.md says what the code says."""

from __future__ import annotations

from pathlib import Path

from stenograph.config.document import settings_document
from stenograph.config.options import OPTIONS
from stenograph.config.passes import PASSES


def test_settings_document_is_fresh() -> None:
    path = Path(__file__).parents[2] / "docs" / "settings.md"
    stale = "run: python -m stenograph.config.document > docs/settings.md"
    assert path.read_text(encoding="utf-8") == settings_document(), stale


def test_every_option_and_pass_is_in_it() -> None:
    text = settings_document()
    assert all(f"`{option.flag}`" in text and option.help for option in OPTIONS.values())
    assert all(f"| {p.name} |" in text for p in PASSES)
