"""The promise of equal texts on a GPU, through compiled passes. Run by `make test-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest

from paradraft import Sampling, load
from paradraft.api import drafter_names, takes_draft
from paradraft.models.loading import Runtime

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", drafter_names())
def test_text_equals_plain_decoding_on_the_cpu(family: Path, name: str) -> None:
    """Guards against noise, masks or cache writes that depend on the device or on compilation."""
    draft = str(family / "pard") if takes_draft(name) else None
    target = str(family / "target")
    plain = load(target, runtime=Runtime(dtype="float64"))
    drafted = load(
        target, drafter=name, draft=draft, k=4, runtime=Runtime(dtype="float64", device="cuda", compiled=True)
    )
    for sampling in (Sampling(), Sampling(temperature=0.9, top_p=0.9, seed=4)):
        expected = plain.generate("helloworld", max_new_tokens=40, sampling=sampling).tokens
        assert drafted.generate("helloworld", max_new_tokens=40, sampling=sampling).tokens == expected
