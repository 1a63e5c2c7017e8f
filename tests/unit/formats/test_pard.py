from __future__ import annotations

import pytest
from transformers import LlamaConfig

from paradraft.formats.pard import CONFIG_KEYS, declare_masks, forget_masks, mask_token_id


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
    assert mask_token_id(LlamaConfig(vocab_size=10, mask_token_id=9), "x") == 9


def test_all_masks_lie_inside_the_embedding() -> None:
    """Guards against an index error in the round whose draft is the first to need the last mask."""
    with pytest.raises(ValueError, match="mask token 10 is outside the embedding of 10 rows"):
        mask_token_id(LlamaConfig(vocab_size=10, mask_token_id=8, pard_masks=3), "x")
    assert mask_token_id(LlamaConfig(vocab_size=10, mask_token_id=8, pard_masks=2), "x") == 8


@pytest.mark.parametrize(("first", "masks", "outside"), [(-1, 3, -1), (0, 11, 10), (10, 2, 10)])
def test_the_mask_that_is_outside_is_named(first: int, masks: int, outside: int) -> None:
    """Guards a message that a user can act on: of several masks the one at fault, the first or the last."""
    with pytest.raises(ValueError, match=f"x: mask token {outside} is outside the embedding of 10 rows"):
        mask_token_id(LlamaConfig(vocab_size=10, mask_token_id=first, pard_masks=masks), "x")


def test_a_mask_is_a_number() -> None:
    """Guards against an error deep inside the model; True is no token id."""
    for found in ("<mask>", 7.0, True):
        config = LlamaConfig(vocab_size=10, name_or_path="some/model")
        config.mask_token_id = found
        with pytest.raises(ValueError, match=f"some/model: the mask token in its config.json is {found!r}, not a"):
            mask_token_id(config, "x")


@pytest.mark.parametrize("masks", [1, 2, 3])
def test_a_declared_mask_is_found_again_and_can_be_forgotten(masks: int) -> None:
    """Guards what training writes for engines: AMD's keys, the number of masks where there are several, nothing of
    the model before, and nothing at all in a model that is no PARD model any more."""
    config = LlamaConfig(vocab_size=10, pard_masks=5, pard_previous_token_rank=3, pard2=True, pard2_scale=1.0)
    plain = LlamaConfig(vocab_size=10).to_dict()
    declare_masks(config, 4, masks)
    assert mask_token_id(config, "x") == 4
    assert {key: config.to_dict()[key] for key in CONFIG_KEYS if key in config.to_dict()} == {
        "pard_token": 4, "mask_token_id": 4, "spd_type": "pard"
    } | ({"pard_masks": masks} if masks > 1 else {})  # fmt: skip
    forget_masks(config)
    assert config.to_dict() == plain
    declare_masks(config, 4)
    assert not hasattr(config, "pard_masks")
