import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.tasks.answer import MAX_NUMBER_CHARS, MAX_TEXT_CHARS, last_number, same_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 18.", "18"), ("$1,234.50!", "1234.50"), ("-5", "-5"), ("a\n-4", "-4"), ("10 - 3 = 7", "7"),
        ("it costs $7", "7"), ("-$7", "-7"), ("$-7", "-7"), ("3/4 of it", "3/4"), ("**12**", "12"),
        ("\\boxed{7}", "7"), ("#### 72", "72"), ("5 kg", "5"), ("7, or rather 8", "8"), ("3,", "3"), ("1 2 3", "3"),
    ],
)  # fmt: skip
def test_the_last_number_is_read(text: str, number: str) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "none",
        "1.2.3",
        "3,4",
        "1,23",
        "5/10/2024",
        "5/0",
        "2^10",
        "x5",
        "5-3",
        "1e9",
        "a_1",
        "9" * 30,
        "\u0663",
        "4\u0663",
    ],
)
def test_what_is_not_plainly_one_number_is_no_answer(text: str) -> None:
    assert last_number(text) is None


def test_listing_many_numbers_gains_nothing() -> None:
    assert last_number(" ".join(str(n) for n in range(100))) == "99"


def test_numbers_before_the_end_of_a_long_text_are_not_looked_at() -> None:
    assert last_number("7" + " " * MAX_TEXT_CHARS) is None


@pytest.mark.parametrize(
    ("right", "answer", "same"),
    [
        ("18", "18", True), ("18", "18.00", True), ("18", "018", True), ("0.75", "3/4", True), ("18", "-18", False),
        ("18", "19", False), ("18", "18.01", False), ("1", "1/1", True), ("0", "0.0", True), ("7", "77", False),
    ],
)  # fmt: skip
def test_values_are_compared_not_digits(right: str, answer: str, same: bool) -> None:
    assert same_number(right, answer) is same


def test_it_works_off_the_main_thread_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(same_number("123456", "123456.0")))
    thread.start()
    thread.join(60)
    assert results == [True]
    assert not caplog.records


@given(st.text(max_size=200))
def test_any_text_gives_a_short_plain_number_or_none(text: str) -> None:
    number = last_number(text)
    assert number is None or (len(number) <= MAX_NUMBER_CHARS + 1 and set(number) <= set("0123456789-./"))


@given(st.text(alphabet="0123456789,./-$^x ", max_size=60))
def test_hostile_number_soup_never_raises(text: str) -> None:
    number = last_number(text)
    if number is not None:
        same_number("7", number)
        same_number(number, number)


def test_the_longest_numbers_do_not_hang() -> None:
    for head in ("9" * 22, "9" * 11 + "/" + "7" * 12, "0." + "9" * 21):
        assert not same_number("7", str(last_number(head)))
