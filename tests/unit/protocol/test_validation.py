"""What pydantic finds is said in our words."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from protocol.validation import expectation


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid")
    count: Annotated[int, Field(ge=1, le=9)] = 1
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    kind: Literal["a", "b"] = "a"
    name: Annotated[str, Field(min_length=2, max_length=4, pattern="^[a-z]+$")] = "abc"
    items: Annotated[list[int], Field(min_length=1, max_length=2)] = [1]
    nested: dict[str, int] = {}
    flag: bool = True
    even: int = 2

    @field_validator("even")
    @classmethod
    def _even(cls, value: int) -> int:
        if value % 2:
            raise ValueError("an even number")
        return value


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"count": "many"}, "an integer"), ({"count": 1.5}, "an integer"), ({"count": None}, "an integer"),
        ({"count": 0}, ">= 1"), ({"count": 10}, "<= 9"), ({"share": 0}, "> 0.0"), ({"share": 1}, "< 1.0"),
        ({"share": "x"}, "a number"), ({"kind": "c"}, "one of 'a' or 'b'"), ({"name": "a"}, "at least 2 characters"),
        ({"name": "abcde"}, "at most 4 characters"), ({"name": "A1"}, "text that matches ^[a-z]+$"),
        ({"name": 3}, "text"), ({"items": []}, "at least 1 items"), ({"items": [1, 2, 3]}, "at most 2 items"),
        ({"items": 3}, "a list"), ({"nested": []}, "an object"), ({"flag": "maybe"}, "true or false"),
        ({"typo": 1}, "no field of this name"), ({"even": 3}, "an even number"),
    ],
)
def test_a_finding_is_said_shortly(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Form.model_validate(fields)
    assert expectation(caught.value.errors(include_url=False)[0]) == expected


def test_an_unknown_finding_keeps_its_own_words() -> None:
    assert expectation({"type": "new_kind", "msg": "Input should be new"}) == "Input should be new"
    assert expectation({"type": "too_short", "msg": "in their words", "ctx": {}}) == "in their words"
