"""What torchao says whenever `transformers` is imported beside it: nothing that a user could mend.

Where it is installed, `transformers` imports it, and it complains of kernels that were built for other machines. The
package imports this module first of all, so that it comes before `transformers`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

COMPLAINTS = {
    "torchao": "Failed to load",
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
}
"""By the logger, words of each record that is dropped."""


def _without(words: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: words not in record.getMessage()


for _name, _words in COMPLAINTS.items():
    logging.getLogger(_name).addFilter(_without(_words))
