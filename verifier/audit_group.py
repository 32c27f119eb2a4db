"""``assay audit FILE`` and ``assay audit VERB``: a command group whose first word may be left out."""

from __future__ import annotations

from typing import Any, Final

from typer.core import TyperGroup

_HELP: Final = frozenset({"--help", "-h"})


class AuditGroup(TyperGroup):
    """A group in which ``audit X.evidence --json`` means ``audit file X.evidence --json``."""

    default = "file"  #: the command that a first word which is no command is handed to

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default command in when the first word is none of ours."""
        if args and args[0] not in self.commands and args[0] not in _HELP:
            args = [self.default, *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

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
