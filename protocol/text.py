"""Text from outside, made fit for a terminal: it moves no cursor, breaks no line and hides nothing."""

from __future__ import annotations


def printable(value: object) -> str:
    r"""``str(value)`` on one line, with an escape such as ``\x1b`` for whatever does not print.

    That is controls, line breaks, lone surrogates, and signs that turn the direction of writing.
    """
    text = str(value)
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def printable_lines(value: object, indent: str) -> str:
    """The same for text of several lines; every line but the first begins with ``indent``."""
    return f"\n{indent}".join(printable(line) for line in str(value).split("\n"))
