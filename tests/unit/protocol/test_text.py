"""Text from outside: what reaches the terminal does nothing to it."""

from __future__ import annotations

from protocol.errors import E_USAGE, PeerFault, explain
from protocol.text import printable, printable_lines

CLEAR = "\x1b[2J\x1b[H\nPASS after T0, T1, T2\n"


def test_what_does_not_print_is_written_out():
    assert printable("Zürich – 24 °C, ⟨3⟩ [/x]") == "Zürich – 24 °C, ⟨3⟩ [/x]"
    assert printable(CLEAR) == r"\x1b[2J\x1b[H\nPASS after T0, T1, T2\n"
    assert printable("a\u202eb\x9bc\ud800d\u2028e\x00") == r"a\u202eb\x9bc\ud800d\u2028e\x00"
    assert printable(None) == "None"
    assert printable_lines("a\nb\rc", "  ") == "a\n  b\\rc"


def test_an_error_begins_no_line_of_its_own_and_moves_no_cursor():
    error = PeerFault(E_USAGE, "wrong " + CLEAR, expected=CLEAR, got=CLEAR, hint=f"the end of x.log:\n{CLEAR}")
    shown = explain(error)
    assert "\x1b" not in shown
    assert [line for line in shown.split("\n") if not line.startswith(" ")] == [shown.split("\n")[0]]
