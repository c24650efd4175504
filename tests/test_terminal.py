"""Tables on a terminal."""

from __future__ import annotations

from fourfold.terminal import table_lines

ROWS = [["name", "calls", "where"], ["a", "1,000", "host"], ["long name", "2", ""]]


def test_the_last_side_goes_for_all_columns_to_come() -> None:
    assert table_lines(ROWS) == [
        "name       calls  where",
        "a          1,000  host",
        "long name  2",
    ]
    assert table_lines(ROWS, "<>") == [
        "name       calls  where",
        "a          1,000   host",
        "long name      2",
    ]
    assert table_lines(ROWS, ">><")[1] == "        a  1,000  host"


def test_a_table_without_rows_has_no_lines() -> None:
    assert table_lines([]) == []
