"""The number that an answer ends with, by which answers to arithmetic questions are marked."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"(?:(?<!\w)[-\u2212])?(?:\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)|\d+)(?:\.\d+)?")
"""With commas between groups of three digits, as TeX writes them too; U+2212 is its minus."""


def final_number(text: str) -> Decimal | None:
    """The last number of a text; None without one.

    >>> final_number("She earns $1,250.50 a day."), final_number("no")
    (Decimal('1250.50'), None)
    >>> final_number("[1,2,3]"), final_number("1{,}250"), final_number("−5")
    (Decimal('3'), Decimal('1250'), Decimal('-5'))
    >>> final_number("#### 18") == final_number("So 18.0"), final_number("from 9-12"), final_number("x = -3,")
    (True, Decimal('12'), Decimal('-3'))
    """
    numbers: list[str] = _NUMBER.findall(text)
    return Decimal(re.sub("[,{}]", "", numbers[-1]).replace("\u2212", "-")) if numbers else None
