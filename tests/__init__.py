"""The tests. What torchao says at import is dropped by this module, which has to come before `transformers`."""

import paradraft.models as paradraft_models  # noqa: F401
