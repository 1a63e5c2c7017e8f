"""A model whose layers are shared out over several devices says what it says on one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paradraft.engine.loader import load, resolve
from paradraft.engine.speculation import Speculation
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import FINAL_NORM, NotFiniteError
from paradraft.models.forward.pipeline import FEW_ROWS, split
from paradraft.models.runtime import Runtime
from paradraft.placement import Placement, Stage, stages_of
from paradraft.sampling_params import Sampling
from paradraft.sources.load_plan import Checkpoint
from paradraft.sources.target_loading import load_planned
from tests.conftest import VOCAB, tiny_model
from tests.support.drafts import draft_of

CPU = min(os.sched_getaffinity(0))
PROMPTS = [[7], [3, 1, 4, 1, 5], [2, 0, 9, 9, 0, 1, 2, 3, 4]]
KINDS = [
    pytest.param(torch.float64, False, id="eager"),
    pytest.param(torch.float32, None, id="C++"),
    pytest.param(torch.bfloat16, None, id="C++, bfloat16"),
]


def both(
    stages: Sequence[Stage], dtype: torch.dtype, compiled: bool | None, layers: int = 5, **settings: Any
) -> tuple[CausalLM, CausalLM]:
    """The same model as a whole and in stages."""
    settings |= {"vocab_size": VOCAB, "compiled": compiled, "width": 16}
    shared_out = tiny_model(3, layers=layers).to(dtype)
    return (
        CausalLM(tiny_model(3, layers=layers).to(dtype), **settings),
        CausalLM(shared_out, stages=split(shared_out, stages), **settings),
    )


@pytest.mark.parametrize(("dtype", "compiled"), KINDS)
@pytest.mark.parametrize("stages", ["cpu/cpu", f"cpu:{CPU}/cpu", "cpu/cpu/cpu/cpu/cpu"])
def test_stages_compute_what_the_whole_does(stages: str, dtype: torch.dtype, compiled: bool | None) -> None:
    """Guards logits, the states of all layers, and the cache: prompts, trees, an accepted path, rows that leave, and
    further embeddings, to the last bit."""
    whole, parts = both(found := stages_of(stages) or (), dtype, compiled)
    assert len(found) > 1 and parts.is_native == whole.is_native == (compiled is None)
    before = os.sched_getaffinity(0)
    layers = [*range(6), FINAL_NORM]
    for lm in (whole, parts):
        lm.start()
        lm.cache.join(3)
        lm.add_embeddings(torch.linspace(-1, 1, 32)[None])
    assert parts.model.get_input_embeddings().weight.shape[0] == VOCAB + 8 > FEW_ROWS
    read = [lm.prefill(PROMPTS, hidden_layers=layers) for lm in (whole, parts)]
    for layer in layers:
        assert torch.equal(read[0].hidden[layer], read[1].hidden[layer])
    tokens_BN = torch.tensor([[7, VOCAB + 8, 5, 1], [5, 2, 2, -1], [4, 4, 70, 9]])
    parents_BN = torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, -1], [-1, 0, 0, 1]])
    for wanted in ([], [FINAL_NORM], [2, 3], layers):
        outs = [lm.forward(tokens_BN, parents_BN, hidden_layers=wanted) for lm in (whole, parts)]
        assert torch.equal(outs[0].logits[:, :3], outs[1].logits[:, :3])
        assert list(outs[1].hidden) == wanted or set(outs[1].hidden) == set(wanted)
        for layer in wanted:
            assert torch.equal(outs[0].hidden[layer], outs[1].hidden[layer])
    for lm in (whole, parts):
        lm.cache.accept_path([[0, 2, 3], [0], [0, 1]])
        lm.cache.keep(torch.tensor([2, 0]))
        saved = lm.cache.save(0, 5)
        lm.cache.join(1)
        lm.cache.restore(2, saved, 5)
    outs = [lm.forward(torch.tensor([[1, 2], [3, 4], [5, 6]])) for lm in (whole, parts)]
    assert torch.equal(outs[0].logits, outs[1].logits)
    states = torch.linspace(-1, 1, 64).view(2, 32)
    assert torch.equal(whole.head(states.to(dtype)), parts.head(states.to(dtype)))
    assert torch.equal(whole.embed(outs[0].logits.argmax(2)), parts.embed(outs[0].logits.argmax(2)))
    assert os.sched_getaffinity(0) == before, "threads are given their CPUs back"


@pytest.mark.parametrize(("dtype", "compiled"), KINDS[:2])
def test_states_that_are_no_numbers(dtype: torch.dtype, compiled: bool | None) -> None:
    """Guards rows beside one that overflows; and that such a prompt is refused."""
    model = tiny_model(3, layers=4).to(dtype)
    lm = CausalLM(model, vocab_size=VOCAB, compiled=compiled, stages=split(model, [Stage()] * 2))
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = torch.nan
    assert lm.is_native == (compiled is None)
    lm.start()
    lm.cache.join(2)
    lm.prefill([[1, 2, 3], [4, 4]])
    logits = lm.forward(torch.tensor([[3, 1], [4, 5]])).logits
    assert logits[0].isfinite().any(1).all() and logits[1, 0].isfinite().any() and logits[1, 1].isnan().any()
    if not lm.is_native:  # in C++ the next logits say it
        with pytest.raises(NotFiniteError) as raised:
            lm.prefill([[1], [5, 5, 5]])
        assert raised.value.row == 1
        return
    lm.prefill([[1], [5, 5, 5]])
    logits = lm.forward(torch.tensor([[1], [1]])).logits
    assert logits[0].isfinite().any() and logits[1].isnan().any()


def test_each_stage_computes_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what goes from one device to the next; the second one here computes shapes alone, so that nothing can be
    copied from it: zeros are in its place."""
    copied = Tensor.to

    def to(tensor: Tensor, *args: Any, **settings: Any) -> Tensor:
        if tensor.is_meta and args[:1] == (torch.device("cpu"),):
            return torch.zeros_like(tensor, device="cpu")
        return copied(tensor, *args, **settings)

    monkeypatch.setattr(Tensor, "to", to)
    model = tiny_model(3, layers=4)
    lm = CausalLM(model, vocab_size=VOCAB, compiled=False, stages=split(model, [Stage(), Stage(device="meta")]))
    there = torch.device("meta")
    assert lm.device == there and model.lm_head.weight.device == there, "tied weights are in two places"
    assert model.get_input_embeddings().weight.device.type == "cpu"
    lm.start()
    lm.cache.join(2)
    assert [keys.device.type for keys, _ in lm.cache.storage] == ["cpu", "cpu", "meta", "meta"]
    out = lm.forward(torch.zeros(2, 3, dtype=torch.long), hidden_layers=[0, 1, 3, 4, FINAL_NORM])
    assert out.logits.shape == (2, 3, VOCAB) and {out.logits.device, *(s.device for s in out.hidden.values())} == {
        there
    }
    lm.cache.accept_path([[0, 2], [0]])
    lm.cache.keep(torch.tensor([1]))
    assert lm.cache.lengths == [1] and lm.embed(torch.zeros(1, 2, dtype=torch.long)).device == there


def test_more_stages_than_layers() -> None:
    model = tiny_model(1, layers=2)
    with pytest.raises(ValueError, match=r"3 stages, and '.*' has 2 layers: use fewer stages"):
        split(model, [Stage()] * 3)


@pytest.mark.parametrize("name", ["pard", "ngram", "eagle", "medusa", "ppd", "lookahead"])
def test_every_kind_of_drafter_drafts_for_stages(family: Path, name: str) -> None:
    """Guards drafters that read the target's states, add to its embeddings, or use its head."""
    target, runtime = str(family / "target"), Runtime(dtype="float64")
    plain = load(target, runtime=runtime)
    placement = Placement(target_stages=(Stage(), Stage()))
    drafted = load(
        target, drafter=name, draft=draft_of(family, name), k=3, runtime=runtime, placement=placement, lengths="fixed"
    )
    for sampling in (Sampling(), Sampling(temperature=0.9, seed=4)):
        texts = ["helloworld", "abc", "T"]
        found, expected = (
            each.generate(texts, max_new_tokens=30, sampling=sampling, batch_size=2) for each in (drafted, plain)
        )
        assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


def test_eight_bits_in_stages() -> None:
    """Guards weights that are rounded after they are shared out."""
    pytest.importorskip("torchao")
    pocket, runtime = Checkpoint.find("pocket"), Runtime(dtype="int8")
    plans = [
        resolve(pocket, [Speculation()], runtime, Placement(target_stages=stages))
        for stages in (None, (Stage(), Stage()))
    ]
    lms = [load_planned(plan).lm for plan in plans]
    for lm in lms:
        lm.start()
        lm.cache.join(1)
        lm.prefill([[1, 2, 3]])
    tokens = torch.tensor([[3, 4, 5]])
    assert torch.equal(*(lm.forward(tokens).logits for lm in lms))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "stages '': name devices with slashes between them, such as cuda:0/cuda:1"),
        ("cpu:0//cpu", "stages 'cpu:0//cpu': name devices with slashes between them"),
        ("cpu:x", "CPUs 'x': use numbers"),
    ],
)
def test_wrong_stages(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        stages_of(text)


def test_places_that_do_not_fit_each_other(family: Path) -> None:
    target = str(family / "target")
    with pytest.raises(ValueError, match="target_stages names the CPUs of each stage: leave out target_cpus"):
        Placement(target_stages=(Stage(),), target_cpus=(CPU,))
    with pytest.raises(ValueError, match="target_stages: there is no CPU 4095 for this process"):
        Placement(target_stages=(Stage(cpus=(4095,)),))
    with pytest.raises(ValueError, match="device='nowhere' cannot be used here"):
        load(target, placement=Placement(target_stages=(Stage(device="nowhere"), Stage())))
