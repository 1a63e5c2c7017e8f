from __future__ import annotations

import pytest
import torch

from paradraft.core import Draft, Prompt, Sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("inf")), ("temperature", float("nan")),
        ("top_k", -1), ("top_p", 0.0), ("top_p", 1.01), ("top_p", float("nan")),
        ("seed", 2**63), ("seed", -(2**63) - 1),
    ],
)  # fmt: skip
def test_sampling_rejects_what_it_cannot_mean(field: str, value: float) -> None:
    """Guards against nonsense settings that would silently sample something else; the message names them."""
    with pytest.raises(ValueError, match=f"{field}={value}"):
        Sampling(**{field: value})


def test_sampling_accepts_the_edges() -> None:
    """Guards against limits that are off by one."""
    assert Sampling(temperature=0.0).is_greedy and not Sampling(temperature=1e-6).is_greedy
    assert Sampling(top_k=0, top_p=1.0, seed=2**63 - 1).seed == 2**63 - 1
    assert Sampling(seed=-(2**63), top_p=1e-9).seed == -(2**63)


def test_prompt_lengths_count_token_zero() -> None:
    """Guards against taking token 0, which is a real one, for padding."""
    prompt = Prompt(tokens=torch.tensor([[0, 0, 5], [0, -1, -1]]), sampling=Sampling())
    assert prompt.lengths.tolist() == [3, 1]
    with pytest.raises(AssertionError):
        Prompt(tokens=torch.tensor([[-1, -1]]), sampling=Sampling())


def test_empty_draft_is_a_chain_of_nothing() -> None:
    """Guards the rounds with K = 0: their draft has no nodes but still one row per prompt."""
    draft = Draft.empty(3, torch.device("cpu"))
    assert draft.tokens.shape == draft.parents.shape == (3, 0)
    assert draft.tokens.dtype == torch.long
