"""Values that a round reads from the device: each waits for it on a GPU. Counted on a CPU, by operation."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.decode.generation import Generation
from paradraft.drafters import drafter_names
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.verify import match
from tests.support.decoding import requests
from tests.support.drafts import draft_of

READS = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "unique"}
MORE = {
    "ppd": {"probes.py": 1, "models/prompt_tokens.py": 1},  # the count of prompt tokens differs by row
    "recycle": {"models/likeliest_tokens.py": 1},
}
"""Reads of drafters that learn from the pass."""
LISTED = ("none", "ngram", "suffix", "recycle", "forced", "lookahead", "translated")
"""Drafters whose drafts are made of lists, and need not be read."""
PROMPTS = [[1, 2, 3], [5, 6, 5, 6, 5]]


class Reads(TorchFunctionMode):
    """Counts operations that read values, but those of drafters, by the file of the package that asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.by_file: Counter[str] = Counter()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") in READS:
            names = [frame.filename.rpartition("/paradraft/")[2] for frame in traceback.extract_stack()]
            if not any(name.startswith("drafters/") for name in names):
                self.by_file[[name for name in names if not name.startswith("/")][-1]] += 1
        return function(*args, **(kwargs or {}))


def reads_of(family: Path, name: str, sampling: Sampling, verify: Any = None) -> Counter[str]:
    """Reads of the fourth round."""
    runtime = Runtime(dtype="float64", compiled=False)
    draft = draft_of(family, name)
    engine = load(str(family / "target"), drafter=name, draft=draft, k=4, runtime=runtime, lengths="fixed")
    batch = engine.new_batch()
    batch.verify = verify or batch.verify
    batch.join(list(map(Generation, requests(PROMPTS, sampling, 99))))
    for _ in range(3):
        batch.step()
    with Reads() as reads:
        batch.step()
    return reads.by_file


@pytest.mark.parametrize(
    ("name", "sampling"),
    [*((name, Sampling()) for name in drafter_names()), ("pard", Sampling(temperature=0.8, seed=1))],
)
def test_a_round_reads_the_draft_and_the_targets_tokens(family: Path, name: str, sampling: Sampling) -> None:
    """Guards rounds on a GPU, where eight reads waited for it: the draft is read once, and so are the draws."""
    draft = {} if name in LISTED else {"core.py": 1}
    expected = Counter(draft) + Counter({"verify/match.py": 1}) + Counter(MORE.get(name, {}))
    assert reads_of(family, name, sampling) == expected


def test_another_read_is_counted(family: Path) -> None:
    """Control: a rule that reads the draft again is one read more."""

    def reading(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
        assert draft.tokens.clone().tolist() == draft.lists[0]
        return match.verify(draft, out, sampler)

    assert sum(reads_of(family, "pard", Sampling(), reading).values()) == 3
