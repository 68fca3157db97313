"""The cases are what went wrong for people with engines of this kind; each has a test that is named by it."""

import re
from pathlib import Path

#: The numbers of the cases, by what they are about.
CASES = {
    "LD": (1, 3, 5, 6, 7, 9, 11, 12, 13, 14),
    "IM": (1, 3, 4, 5, 7, 9, 10, 11, 12, 13, 16, 17, 20, 21, 22, 23, 24),
    "PO": (1, 5, 7, 8, 9, 10, 11, 12, 13, 14),
    "VI": (1, 3, 5, 7, 8, 10),
    "DS": (1, 2, 4, 6, 8, 9, 10, 12),
    "TX": (1, 2, 4, 6),
    "TR": (1, 2, 4, 6, 8, 10, 11, 12, 14, 15),
    "IV": (1, 2, 4, 6, 8, 9, 11, 12, 13, 15, 16, 18),
    "GN": (1, 2, 4, 6, 7, 9, 10, 11, 13),
    "BT": (1, 2, 5, 7),
    "MP": (1, 3, 4, 7),
    "CS": (1, 2, 4, 6, 8),
    "EN": (1, 3, 4, 6, 8),
}

_NAME = re.compile(r"^def test_([a-z]{2})_(\d\d)_", re.MULTILINE)


def test_every_case_has_a_test_that_is_named_by_it():
    files = Path(__file__).parents[1].rglob("test_*.py")
    tested = {(kind.upper(), int(number)) for file in files for kind, number in _NAME.findall(file.read_text())}
    assert {(kind, number) for kind, numbers in CASES.items() for number in numbers} - tested == set()
