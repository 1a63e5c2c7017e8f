"""Silences a harmless torchao import warning.

Where torchao is installed, `transformers` imports it, and it warns about kernels that were built for other machines.
The package imports this module first, so that the filter is set before `transformers` is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

COMPLAINTS = {
    "torchao": "Failed to load",
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
}
"""Logger name to a substring of the messages that are dropped."""


def _without(words: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: words not in record.getMessage()


for _name, _words in COMPLAINTS.items():
    logging.getLogger(_name).addFilter(_without(_words))
