from __future__ import annotations

import pytest
from transformers import LlamaConfig

from paradraft.formats.pard import mask_token_id


def test_mask_token_has_two_names() -> None:
    """Guards AMD's published drafters, which say `pard_token`; id 0 is an id and not a missing one."""
    assert mask_token_id(LlamaConfig(vocab_size=10, pard_token=7), "x") == 7
    assert mask_token_id(LlamaConfig(vocab_size=10, mask_token_id=8), "x") == 8
    assert mask_token_id(LlamaConfig(vocab_size=10, mask_token_id=0, pard_token=7), "x") == 0


def test_an_ordinary_model_is_no_pard_drafter() -> None:
    """Guards against drafting with a made-up mask, which works, slowly, and tells nobody."""
    with pytest.raises(ValueError, match="some/model names no mask token"):
        mask_token_id(LlamaConfig(vocab_size=10), "some/model")


@pytest.mark.parametrize("mask_id", [-1, 10])
def test_mask_token_lies_inside_the_embedding(mask_id: int) -> None:
    """Guards against an index error deep inside the model."""
    with pytest.raises(ValueError, match=f"mask token {mask_id} is outside the embedding of 10 rows"):
        mask_token_id(LlamaConfig(vocab_size=10, mask_token_id=mask_id), "x")


def test_all_masks_lie_inside_the_embedding() -> None:
    """Guards against an index error in the round whose draft is the first to need the last mask."""
    with pytest.raises(ValueError, match="mask token 10 is outside the embedding of 10 rows"):
        mask_token_id(LlamaConfig(vocab_size=10, mask_token_id=8, pard_masks=3), "x")
    assert mask_token_id(LlamaConfig(vocab_size=10, mask_token_id=8, pard_masks=2), "x") == 8
