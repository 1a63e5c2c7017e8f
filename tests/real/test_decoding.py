"""Real models give the same tokens with and without drafters, decoded by the passes in C++."""

from __future__ import annotations

import pytest

from paradraft.engine.speculation import Speculation
from paradraft.tree import Tree
from tests.real.conftest import CODER_05B, CODER_15B, FOLDERS, SAMPLINGS, SMOLLM2, TOKENS, Loaded, real

pytestmark = [pytest.mark.real, pytest.mark.parametrize("sampling", SAMPLINGS)]


def test_answers_are_of_the_model(target: Loaded, sampling: str) -> None:
    """Guards what all others compare with: answers that are texts, and not one for all questions."""
    answers = target.plain(sampling)
    assert len({tuple(answer) for answer in answers}) == len(answers)
    texts = [target.engine.target.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
    assert all(4 < len(answer) <= TOKENS for answer in answers), texts
    assert all("�" not in text and sum(map(str.isascii, text)) > 0.9 * len(text) for text in texts), texts
    if sampling == "T=0":
        assert all(word in texts[0] for word in ("Anna", "lake", "ducks")), texts[0]


def test_ngram_in_a_batch(target: Loaded, sampling: str) -> None:
    """Guards losslessness of drafts that copy, in a batch of 4 whose rows accept differently."""
    stats = target.check(target.with_drafter(Speculation(drafter="ngram", lengths="fixed")), sampling, batch_size=4)
    assert sum(sum(each.accepted) for each in stats), "nothing was accepted, so the equality shows nothing"


def test_trees(target: Loaded, sampling: str) -> None:
    """Guards losslessness of drafts that branch, by a real draft of the same family."""
    draft = SMOLLM2 if SMOLLM2 in (target.name, FOLDERS.get(target.name)) else CODER_05B
    tree = Speculation(drafter="autoregressive", draft=real(draft), k=4, tree=Tree(budget=12), lengths="fixed")
    stats = target.check(target.with_drafter(tree), sampling, batch_size=2)
    assert sum(sum(each.accepted) for each in stats) > TOKENS


@pytest.mark.parametrize("target", [(CODER_15B, "auto")], ids=[CODER_15B], indirect=True, scope="module")
@pytest.mark.parametrize(("k", "batch_size"), [(3, 1), (5, 4)])
def test_a_model_of_another_family_drafts(target: Loaded, sampling: str, k: int, batch_size: int) -> None:
    """Guards a draft model with other tokens: SmolLM2 for Qwen2.5, with more than one accepted token a round."""
    speculation = Speculation(drafter="translated", draft=real(SMOLLM2), k=k, lengths="fixed")
    stats = target.check(target.with_drafter(speculation), sampling, batch_size=batch_size)
    assert sum(each.tokens for each in stats) > 1.5 * sum(each.rounds for each in stats)


@pytest.mark.parametrize("target", [(CODER_15B, "auto")], ids=[CODER_15B], indirect=True, scope="module")
@pytest.mark.parametrize(("k", "batch_size"), [(3, 1), (5, 4)])
def test_a_small_model_drafts_for_a_larger_one(target: Loaded, sampling: str, k: int, batch_size: int) -> None:
    """Guards the pair that users have: 0.5B for 1.5B, which accepts more than two drafted tokens a round."""
    engine = target.with_drafter(Speculation(drafter="autoregressive", draft=real(CODER_05B), k=k, lengths="fixed"))
    stats = target.check(engine, sampling, batch_size=batch_size)
    assert sum(each.tokens for each in stats) > 2 * sum(each.rounds for each in stats)
