"""The page at /: a chat with the model, in one document that needs no other file."""

from __future__ import annotations

from html import escape
from importlib.resources import files

PARTS = {"style": ("page.css",), "script": ("markdown.js", "page.js")}
"""Files by the place where they go."""


def chat_page(model: str, temperature: float, *, is_chat: bool) -> str:
    """The document.

    Args:
        model: its name.
        temperature: at which the page begins.
        is_chat: whether the page begins with conversations; otherwise with texts that the model continues.
    """
    folder = files(__name__)

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    page = read("page.html")
    for place, names in PARTS.items():
        page = page.replace(f"{{{{{place}}}}}", "".join(map(read, names)))
    page = page.replace("{{temperature}}", f"{temperature:g}").replace("{{chat}}", "checked" if is_chat else "")
    return page.replace("{{model}}", escape(model))
