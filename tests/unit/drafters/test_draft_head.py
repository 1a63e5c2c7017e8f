"""The output head of drafters on the target's states: the same logits as the target's head, for fewer ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paradraft.drafters.parts.draft_head import DOWN, UP, draft_head
from paradraft.formats.head import Head, TargetIdentity
from paradraft.formats.vocab_map import D2T, T2D, VocabMap
from paradraft.models.causal_lm import CausalLM
from paradraft.models.quantized import QuantizedTensor
from paradraft.models.runtime import Runtime
from paradraft.sources.target_loading import load_target
from tests.conftest import VOCAB
from tests.support.gguf_files import tiny_model, write_gguf

IDS = torch.tensor([0, 3, 4, 17, 40, 63])
RUNTIMES = {
    "eager": Runtime(dtype="float64", compiled=False),
    "float32": Runtime(dtype="float32"),
    "bfloat16": Runtime(dtype="bfloat16"),
    "int8": Runtime(dtype="int8"),
    "int4": Runtime(dtype="int4"),
}


def head_of(lm: CausalLM, weights: dict[str, torch.Tensor]) -> Head:
    return Head(config={}, target=TargetIdentity.of(lm.model.config, reads_weights=False), weights=weights, name="it")


def trimmed(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    vocab_map = VocabMap(to_target=ids)
    return {D2T: vocab_map.d2t(), T2D: vocab_map.t2d(int(ids.max()) + 1)}


def check_same(logits: torch.Tensor, expected: torch.Tensor, lm: CausalLM) -> None:
    """To the last bit, but for torch's products of numbers, which depend on the shape."""
    if lm.is_native or isinstance(lm.model.lm_head.weight, QuantizedTensor):
        assert torch.equal(logits, expected)
    else:
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def states_of(lm: CausalLM) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, lm.model.config.hidden_size, dtype=torch.float64).to(lm.model.dtype)


@pytest.fixture(params=[*RUNTIMES, "gguf", "gguf with torch"])
def lm(request: pytest.FixtureRequest, family: Path, tmp_path: Path) -> CausalLM:
    if request.param in RUNTIMES:
        return load_target(str(family / "target"), RUNTIMES[request.param]).lm
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_model("llama"))
    return load_target(str(file), Runtime(compiled=None if request.param == "gguf" else False)).lm


def test_its_logits_are_those_of_the_whole_head(lm: CausalLM) -> None:
    """Guards each row's product in every form in which weights are stored, and the ids of the rows."""
    states, whole = states_of(lm), lm.head(states_of(lm))
    some = draft_head(lm, head_of(lm, trimmed(IDS)))(states)
    check_same(some[..., IDS], whole[..., IDS], lm)
    others = torch.ones(lm.vocab_size, dtype=torch.bool)
    others[IDS] = False
    assert bool((some[..., others] == -torch.inf).all())


def test_all_ids_change_nothing(lm: CausalLM) -> None:
    states = states_of(lm)
    every = draft_head(lm, head_of(lm, trimmed(torch.arange(lm.vocab_size))))
    check_same(every(states), lm.head(states), lm)
    assert torch.equal(draft_head(lm, head_of(lm, {}))(states), lm.head(states))


def test_reserved_ids_are_not_drafted(family: Path) -> None:
    """Guards a mask token that another drafter of the union reserves: this head has its own rows, but the same ids."""
    lm = load_target(str(family / "target"), RUNTIMES["float32"]).lm
    head = draft_head(lm, head_of(lm, trimmed(IDS)))
    lm.reserve([17])
    assert bool((head(states_of(lm))[..., 17] == -torch.inf).all())
    lm.reserve([])
    assert bool(head(states_of(lm))[..., 17].isfinite().all())


def test_a_head_of_low_rank_is_its_product(family: Path) -> None:
    lm = load_target(str(family / "target"), RUNTIMES["eager"]).lm
    width, generator = lm.model.config.hidden_size, torch.Generator().manual_seed(1)
    down, up = (torch.randn(*shape, generator=generator).double() for shape in ((4, width), (len(IDS), 4)))
    logits = draft_head(lm, head_of(lm, trimmed(IDS) | {DOWN: down, UP: up}))(states_of(lm))
    torch.testing.assert_close(logits[..., IDS], states_of(lm) @ down.T @ up.T)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({D2T: torch.tensor([0, VOCAB])}, f"d2t names the token {VOCAB + 1}"),
        (trimmed(IDS) | {T2D: torch.ones(VOCAB, dtype=torch.bool)}, "d2t and t2d disagree about the token 1"),
        (trimmed(IDS) | {UP: torch.zeros(6, 4)}, "low_rank.down.weight is missing"),
        (trimmed(IDS) | {UP: torch.zeros(5, 4), DOWN: torch.zeros(4, 32)}, r"up.weight has the shape \(5, 4\)"),
    ],
)
def test_a_damaged_head_is_refused(family: Path, weights: dict[str, torch.Tensor], message: str) -> None:
    lm = load_target(str(family / "target"), RUNTIMES["eager"]).lm
    with pytest.raises(ValueError, match=message):
        draft_head(lm, head_of(lm, weights))
