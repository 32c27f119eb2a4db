"""What a field expected, in our words: pydantic's findings said shortly and always in the same form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Kind of finding -> what was expected; braces name the finding's context.
_WORDS: Final[dict[str, str]] = {
    "missing": "a value",
    "extra_forbidden": "no field of this name",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "dict_type": "an object",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "at least {min_length} items",
    "too_long": "at most {max_length} items",
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of fewer digits",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "text that matches {pattern}",
    "literal_error": "one of {expected}",
    "enum": "one of {expected}",
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "less_than": "< {lt}",
    "less_than_equal": "<= {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "none_required": "null",
    "path_type": "a path",
    "json_invalid": "JSON",
    "json_type": "JSON",
}


def expectation(finding: Mapping[str, Any]) -> str:
    """What was expected where ``finding`` (one of ``ValidationError.errors()``) was made.

    A finding of a validator of our own carries its own words, which are kept.
    """
    words = _WORDS.get(finding["type"])
    if words is None:
        return str(finding["msg"]).removeprefix("Value error, ")
    try:
        return words.format_map(finding.get("ctx") or {})
    except KeyError:
        return str(finding["msg"])
