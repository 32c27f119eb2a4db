"""The front door: one command line that mounts each part's commands and imports a part only when it is used.

Exit codes: 0 all is well, 1 something failed, 2 bad usage or configuration, 130 interrupted. ``assay audit`` has its
own (see its help).
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from protocol.errors import AssayError, exit_status, explain

__version__ = "0.1.0"

#: Command -> (module that holds its Typer ``app``, one line for the overview).
PARTS: Final[dict[str, tuple[str, str]]] = {
    "up": ("coordinator.up_cli", "Run a whole network on this machine and watch it."),
    "node": ("node.cli", "Lend compute: join a run, generate rollouts, follow the weights."),
    "coordinator": ("coordinator.cli", "Operate a run: create it, serve it, invite and ban nodes."),
    "verifier": ("verifier.cli", "Check what nodes handed in, and say so with evidence."),
    "learner": ("learner.cli", "Train on verified rollouts and publish checkpoints."),
    "weights": ("protocol.weights_cli", "Look at, check, clear up and export published weights."),
    "audit": ("verifier.audit_cli", "Check one evidence file by yourself, offline."),
}

#: Options of the front door alone.
COMPLETION: Final = frozenset({"install_completion", "show_completion"})

EPILOG: Final = """\b
Examples:
  assay up demo                               a whole network in the folder demo
  assay node join LINK --home ~/.assay        join a run by its link
  assay audit some.evidence --checkpoint DIR  check what somebody else did
  assay node --help                           what a part can do

\b
Exit codes: 0 well, 1 failed, 2 bad usage or configuration, 130 interrupted.
"""


class Parts(TyperGroup):
    """A group whose members are imported when they are called, and not to list them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the parts, in the order of the overview."""
        return list(PARTS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a part, imported now; None when there is no such part."""
        if cmd_name not in PARTS:
            return None
        command = typer.main.get_command(importlib.import_module(PARTS[cmd_name][0]).app)
        command.name = cmd_name
        command.params = [param for param in command.params if param.name not in COMPLETION]
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The overview, from :data:`PARTS` alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in PARTS.items()])


app = typer.Typer(
    cls=Parts, rich_markup_mode=None, no_args_is_help=True, epilog=EPILOG, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"assay {__version__}")
        raise typer.Exit


@app.callback()
def front(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Assay: a decentralised, verifiable reinforcement-learning network for language models."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in itertools.takewhile(lambda argument: argument.startswith("-"), arguments)
    try:
        typer.main.get_command(app).main(args=arguments, prog_name="assay")
    except AssayError as error:
        if debug:
            raise
        print(explain(error), file=sys.stderr)
        sys.exit(exit_status(error))
    except OSError as error:
        # A path or an address of the caller's that no part foresaw; the operating system's words name it.
        if debug or error.filename is None:
            raise
        print(f"error E_USAGE: {error.strerror}\n  got:      {error.filename}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
