"""Which of the contract `make test` runs of drafters that share nearly all of their code with another."""

from __future__ import annotations

import pytest

RELATIVES = ("eagle", "hydra", "medusa", "medusa_parallel")
"""They are tested through `eagle_parallel`; `make test-long` runs all tests of all."""
QUICK_RUNTIMES = ("compiled, float32", "C++, float32")
QUICK_DECODING = ("test_text_equals_plain_decoding", "test_something_is_accepted")
QUICK_TRAINING = ("test_decoding_computes_what_is_trained", "test_the_result_decodes_losslessly")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow what relatives need not show every time."""
    for item in items:
        values = vars(item.callspec)["params"] if hasattr(item, "callspec") else {}
        if values and values.get("name") in RELATIVES and not _is_quick(item, values):
            item.add_marker(pytest.mark.slow)


def _is_quick(item: pytest.Item, values: dict[str, object]) -> bool:
    if item.path.name == "test_every_trainee.py":
        return getattr(item, "originalname", "") in QUICK_TRAINING
    if getattr(item, "originalname", "") not in QUICK_DECODING:
        return False
    runtimes = [value for value in values.values() if isinstance(value, str) and ("float" in value)]
    return all(value in QUICK_RUNTIMES for value in runtimes) and values.get("k", 2) == 2
