"""The numeric answer in an untrusted text, and whether it equals the right one.

Only the *last* number counts, so naming many numbers gains nothing, and it must be a plain number: the text that
reaches ``math-verify`` is at most ``MAX_NUMBER_CHARS`` characters of digits, one sign, one point or one fraction
bar. That bounds the time by construction, on any thread, and keeps the reward a pure function of the text; a wall
clock limit would let two machines disagree about a reward.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any, Final

#: Only this many characters at the end of a completion are looked at.
MAX_TEXT_CHARS: Final = 4096
#: Longest number that is read, sign and separators included.
MAX_NUMBER_CHARS: Final = 24

_RUN = re.compile(r"[0-9][0-9.,/]*")
_NUMBER = re.compile(r"(?P<whole>[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.(?P<decimals>[0-9]+)|/(?P<below>[0-9]+))?")


def last_number(text: str) -> str | None:
    """The last number of ``text`` in plain form (``-1234.5``, ``3/4``), or None when it is not a plain number.

    Thousands separators and a currency sign are dropped. A last number that is ambiguous (``1.2.3``, ``3,4``,
    ``5/10/2024``, ``2^10``, ``x5``) is no answer rather than a guess.
    """
    tail = text[-MAX_TEXT_CHARS:]
    runs = list(_RUN.finditer(tail))
    if not runs:
        return None
    found = runs[-1]
    number = _NUMBER.fullmatch(found.group().rstrip(".,/"))
    if number is None or len(number.group()) > MAX_NUMBER_CHARS or int(number["below"] or 1) == 0:
        return None
    if tail[found.end() : found.end() + 1].isnumeric():  # a digit of another script goes on with the number
        return None
    before = tail[: found.start()].rstrip("$")
    negative = before.endswith(("-", "\u2212"))
    if negative:
        before = before[:-1].rstrip("$")
    if before.endswith(("^", "_", ".")) or (before[-1:].isalnum() and not tail[found.start() - 1].isspace()):
        return None
    plain = number["whole"].replace(",", "")
    plain += f".{number['decimals']}" if number["decimals"] else f"/{number['below']}" if number["below"] else ""
    return f"-{plain}" if negative else plain


def same_number(right: str, answer: str) -> bool:
    """Whether two plain numbers are equal in value (``18`` and ``18.00``, ``3/4`` and ``0.75``)."""
    from math_verify import verify

    return right == answer or bool(
        verify([*_parse(right)], [*_parse(answer)], timeout_seconds=None, raise_on_error=True)
    )


@lru_cache(maxsize=4096)
def _parse(number: str) -> tuple[Any, ...]:
    from math_verify import ExprExtractionConfig, parse

    for part in ("parser", "grader"):  # they warn that no time limit is set; the bounded input is the limit
        logging.getLogger(f"math_verify.{part}").setLevel(logging.ERROR)
    extraction = [ExprExtractionConfig()]
    return tuple(parse(number, extraction, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True))
