"""Elements of an HTML page: whatever is not an element already is escaped."""

from __future__ import annotations

import html
import re
from typing import Self

VOID = ("meta", "br", "link")
"""Elements that have no end."""
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Characters that a browser drops, that cannot be written, or that turn the text around them."""


class Element(str):
    """A piece of a page, escaped where it had to be."""

    __slots__ = ()

    @classmethod
    def of(cls, name: str, /, *children: str, **attributes: object) -> Self:
        """An element.

        Args:
            name: such as "p".
            children: elements, or texts, which are escaped.
            attributes: their underscores become hyphens, but for those at the end (`class_`); None and False are
                left out, True stands without a value.

        >>> Element.of("p", "a < b ", Element.of("b", "bold"), class_="note", aria_hidden=True, title=None)
        '<p class="note" aria-hidden>a &lt; b <b>bold</b></p>'
        """
        written = "".join(
            f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(str(value))}"')
            for key, value in attributes.items()
            if value is not None and value is not False
        )
        inside = "".join(child if isinstance(child, Element) else escaped(child) for child in children)
        return cls(f"<{name}{written}>" + ("" if name in VOID else f"{inside}</{name}>"))


def escaped(text: str) -> str:
    """A text that a page shows as it is; what could not be seen is named.

    >>> escaped("</script>\\x1b[2m"), escaped("a\\u202eb")
    ('&lt;/script&gt;␛[2m', 'a⟨U+202E⟩b')
    """
    return html.escape(_UNSEEN.sub(_named, text))


def _named(found: re.Match[str]) -> str:
    code = ord(found[0])
    # Unicode has a picture for each of the first 32 characters and for DEL.
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"⟨U+{code:04X}⟩"
