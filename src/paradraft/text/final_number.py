"""The number that an answer ends with, by which answers to arithmetic questions are marked."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"(?:(?<!\w)-)?\d[\d,]*(?:\.\d+)?")


def final_number(text: str) -> Decimal | None:
    """The last number of a text; None without one.

    >>> final_number("She earns $1,250.50 a day."), final_number("no")
    (Decimal('1250.50'), None)
    >>> final_number("#### 18") == final_number("So 18.0"), final_number("from 9-12"), final_number("x = -3,")
    (True, Decimal('12'), Decimal('-3'))
    """
    numbers: list[str] = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None
