"""``assay audit FILE`` and ``assay audit VERB``: a command group whose first word may be left out.

A wrong call ends like every other error of an audit: with a code, and as JSON when that was asked for.
"""

from __future__ import annotations

from typing import Any, Final

import typer
from typer.core import TyperGroup

from protocol.errors import E_USAGE, AssayError, LocalFault
from verifier.audit_exit import DEBUG, as_ours, refuse

_HELP: Final = frozenset({"--help", "-h"})
#: Verb -> kind of its report.
KINDS: Final = {"file": "submission", "log": "log", "run": "run", "explain": "explanation"}
#: What a wrong call raises; typer exports its descendants only.
_WrongCall: Final[Any] = typer.BadParameter.__mro__[1]


class AuditGroup(TyperGroup):
    """A group in which ``audit X.evidence --json`` means ``audit file X.evidence --json``."""

    default = "file"  #: the command that a first word which is no command is handed to

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in when the first word is none of ours."""
        if args and args[0] not in self.commands and args[0] not in _HELP:
            args = [self.default, *args]
        ctx.meta["assay.audit.words"] = tuple(args)
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def invoke(self, ctx: Any) -> Any:
        """Run the command; words that do not fit it are an ``E_USAGE``, and what nobody foresaw an ``E_INTERNAL``."""
        words = ctx.meta["assay.audit.words"]
        verb = words[0] if words else self.default
        DEBUG.set(bool(ctx.find_root().params.get("debug")))
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except _WrongCall as error:
            fault: AssayError = LocalFault(
                E_USAGE, error.format_message().rstrip("."), expected=f"what `{ctx.command_path} {verb} --help` says",
                got=" ".join(words[1:])[:200] or "nothing",
            )
        except Exception as error:  # noqa: BLE001 - a status of 1 would be a word against somebody
            fault = as_ours(error)
        return refuse(KINDS.get(verb, "submission"), fault, "--json" in words)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Our own options, those of the default command, then the commands."""
        default = self.commands[self.default]
        records = [param.get_help_record(ctx) for param in default.get_params(ctx)]
        with formatter.section(f"Arguments and options of `{ctx.command_path} FILE`"):
            formatter.write_dl([record for record in records if record is not None])
        self.format_commands(ctx, formatter)

    def get_params(self, ctx: Any) -> list[Any]:
        """None but help: completion is the front door's."""
        return [param for param in super().get_params(ctx) if param.name == "help"]
