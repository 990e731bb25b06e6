"""The entry point: commands, and how failures look."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import typer

from stenograph.cli import bench, explain, generate, plan, serve, version
from stenograph.config.options import nearest
from stenograph.errors import StenographError

app = typer.Typer(
    name="steno",
    help="Serve large language models. Every setting can say who set it and why: steno explain.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (serve, generate, explain, plan, version):
    app.command(name=command.__name__.rpartition(".")[2], help=command.__doc__)(command.command)
app.add_typer(bench.app, name="bench")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command. A failure that the user can do something about is one line on stderr and exit status 2; a defect
    of ours is one line and status 1, its traceback shown with --log-level debug."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(args=arguments, prog_name="steno", standalone_mode=False)
    except StenographError as error:
        _fail(str(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        _fail("stopped", 130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone; Python would complain once more at exit
        sys.exit(1)
    except ModuleNotFoundError as error:
        if logging.getLogger("stenograph").isEnabledFor(logging.DEBUG):
            raise
        _fail(f"the Python package {error.name} is not installed. Install it: pip install {error.name}", 2)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help has been printed
            sys.exit(2)
        if hasattr(error, "format_message"):  # a usage error; no common base class across versions of typer
            _fail(_usage(error), 2)
        if logging.getLogger("stenograph").isEnabledFor(logging.DEBUG):
            raise
        _fail(f"unexpected {type(error).__name__}: {error} (--log-level debug shows where)", 1)
    sys.exit(status if isinstance(status, int) else 0)


def _usage(error: Exception) -> str:
    """A usage error on one line; an unknown option with the nearest one."""
    name = getattr(error, "option_name", None)
    context = getattr(error, "ctx", None)
    if name and context is not None and "o such option" in error.format_message():  # type: ignore[attr-defined]
        flags = [flag for p in context.command.params for flag in (*p.opts, *p.secondary_opts) if flag.startswith("--")]
        close = nearest(name, flags)
        return f"unknown option {name}." + (
            f" Did you mean {close}?" if close else f" See {context.command_path} --help."
        )
    return " ".join(error.format_message().split())  # type: ignore[attr-defined]


def _fail(message: str, status: int) -> None:
    print(f"steno: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(status)
