"""The tests. What torchao says at import is dropped by the package, which has to come before `transformers`."""

import paradraft  # noqa: F401
