"""docs/settings.md, out of the options' declarations and the passes' docstrings. `python -m stenograph.config.document`
prints it; a test compares it with the file."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from stenograph.config.device import NAMED
from stenograph.config.options import OPTIONS, Option
from stenograph.config.presets import presets
from stenograph.config.resolve import all_passes, show
from stenograph.config.support import THIS_VERSION

_HEAD = """# Settings

<!-- Generated: python -m stenograph.config.document > docs/settings.md. Edit config/options.py and config/rules/. -->

Every setting can be given as a flag (`--page-size 16`), as an environment variable (`STENOGRAPH_PAGE_SIZE=16`), in a
YAML file (`--config settings.yaml` or `STENOGRAPH_CONFIG`, with `page_size: 16`), or to `LLM(page_size=16)`. Flags go
before variables, variables before the file, the file before the defaults. What is unknown or unreadable is an error.

What is left unset is filled by the rules below, and what can't be is changed with a warning or refused with a remedy.
`steno explain` shows every setting with who set it and why; `--strict` refuses instead of changing.
"""


def settings_document() -> str:
    """The whole document."""
    parts = [_HEAD]
    for group, options in groupby(OPTIONS.values(), key=lambda option: option.group):
        parts.append(
            f"## {group.capitalize()}\n\n| setting | values | default | what it is |\n|---|---|---|---|\n"
            + _rows(options)
        )
    parts.append(
        "## Rules\n\nEach rule is one pass with a name. A *fill* sets what nobody set; the others may also change a "
        "setting that was made (a warning, with `--strict` an error) or reject settings that don't go together. They "
        "run in this order, and again until nothing changes.\n\n| rule | kind | what it does |\n|---|---|---|\n"
        + "".join(f"| {p.name} | {'fill' if p.fills else 'rule'} | {_cell(p.doc)} |\n" for p in all_passes())
    )
    parts.append(
        "## What this version runs\n\n"
        + "".join(
            f"- {title}: {', '.join(sorted(names)) or 'none yet'}\n"
            for title, names in (
                ("attention backends", THIS_VERSION.attention),
                ("recording of decode", THIS_VERSION.decode_graphs),
                ("recording of prefill", THIS_VERSION.prefill_graphs),
                ("speculation", THIS_VERSION.speculation),
                ("further features", THIS_VERSION.features),
                ("quantisation", THIS_VERSION.quantizations),
                ("KV cache", THIS_VERSION.kv_dtypes),
            )
        )
        + "\nOther values resolve and are explained, so that a configuration can be checked ahead; the engine refuses "
        "them.\n"
    )
    parts.append(
        "## To explain and plan without the thing\n\n"
        f"- devices (`--device`): {', '.join(NAMED)}, cpu\n- models (`--model-preset`): {', '.join(presets())}\n"
    )
    return "\n".join(parts)


def _rows(options: Iterable[Option]) -> str:
    return "".join(_row(option) for option in options)


def _row(option: Option) -> str:
    values = option.expects().removeprefix("one of ")
    default = option.auto or show(option.default)
    return f"| `{option.flag}` | {_cell(values)} | {_cell(default)} | {_cell(option.help)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    print(settings_document(), end="")
