"""Top-p by sorting a few tokens."""

from __future__ import annotations

import pytest
import torch

from paradraft.sampling import distribution
from paradraft.sampling.distribution import filtered_logits
from paradraft.sampling_params import Sampling


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("likeliest", [1, 3, 40])
def test_the_nucleus_is_what_its_definition_says(p: float, likeliest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the shortcut of sorting a few tokens: with ties, at any number of them, and in rows whose nucleus is
    larger beside others, the tokens that stay are those of one loop over all in their order."""
    monkeypatch.setattr(distribution, "LIKELIEST", (likeliest, 2 * likeliest))
    generator = torch.Generator().manual_seed(5)
    logits = (
        torch.randn(3, 4, 40, generator=generator, dtype=torch.float64) * torch.tensor([0.1, 2.0, 9.0])[:, None, None]
    )
    logits[:, 1] = logits[:, 1].round()  # many are equally likely
    logits[:, 2, 5:30] = -torch.inf
    found = filtered_logits(logits, Sampling(temperature=1.0, top_p=p))
    for row, filtered in zip(logits.view(-1, 40), found.view(-1, 40), strict=True):
        probs, reached, kept = row.softmax(-1).tolist(), 0.0, set[int]()
        for token in sorted(range(40), key=lambda token: (-row[token].item(), token)):
            if reached >= p:
                break
            kept.add(token)
            reached += probs[token]
        assert set(filtered.isfinite().nonzero()[:, 0].tolist()) == {token for token in kept if row[token] > -torch.inf}
        alone = filtered_logits(row[None, None], Sampling(temperature=1.0, top_p=p))
        assert torch.equal(alone.view(-1), filtered)


@pytest.mark.parametrize("p", [1e-320, 1e-9, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_nucleus_is_never_empty(p: float, dtype: torch.dtype) -> None:
    """Guards servers: one request with a tiny p, or a model that breaks, ended the answers of a whole batch."""
    logits = torch.zeros(1, 2, 50, dtype=dtype)
    logits[0, 0, 7] = 1e4
    logits[0, 1] = torch.nan
    found = filtered_logits(logits, Sampling(temperature=1.0, top_p=p))
    assert found[0, 0].isfinite().nonzero().tolist() == [[7]] and found[0, 1].isnan().all()
