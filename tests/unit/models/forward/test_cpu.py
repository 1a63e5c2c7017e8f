"""The pass in C++: it computes what the model does, and the same to the last bit however it is asked."""

from __future__ import annotations

import itertools
import math
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from paradraft.models import cached_rows
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.compiled import CompiledPass
from paradraft.models.forward.cpu.matrix import KINDS, PackedMatrix, WrongPassError
from paradraft.models.forward.cpu.model import NativePass, can_serve
from paradraft.models.quantization import quantize
from paradraft.tree import ABSENT
from tests.support.decoding import empty_rows
from tests.support.random_models import KINDS_OF_MODELS, SIZES, random_model


def lm_of(model: PreTrainedModel, **settings: int) -> CausalLM:
    lm = CausalLM(model, vocab_size=model.config.vocab_size, compiled=True, **settings)
    assert isinstance(lm._compute, NativePass)
    empty_rows(lm, 1)
    return lm


def tokens(count: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(1, 60, (rows, count), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS_OF_MODELS)
@pytest.mark.parametrize("are_rounded", [False, True])
def test_logits_are_the_models_own(kind: str, size: tuple[int, ...], are_rounded: bool) -> None:
    """Guards the arithmetic, for every architecture, sizes that no vector divides, and weights that are stored as
    bfloat16 because they are such numbers."""
    model = random_model(kind, size)
    if are_rounded:
        model = model.to(torch.bfloat16).float()
    lm = lm_of(model)
    kind_of_weights = KINDS[torch.bfloat16 if are_rounded and size[0] % 2 == 0 else torch.float32]
    assert all(layer.gate.kind == kind_of_weights for layer in lm._compute._model.layer[:3])
    text = tokens(40)
    expected = model.double()(text).logits
    assert torch.allclose(lm.forward(text).logits.double(), expected, rtol=1e-3, atol=1e-4 * float(expected.std()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS_OF_MODELS)
def test_bfloat16_models_are_served(kind: str, size: tuple[int, ...]) -> None:
    """Guards a cache in bfloat16, and products of such numbers where the CPU has them: nothing but rounding may differ,
    and clearly less than in the model's own passes, which round all that they compute."""
    model = random_model(kind, size, torch.bfloat16)
    lm, text = lm_of(model), tokens(40)
    assert lm._compute._model.layer[0].gate.kind == KINDS[torch.bfloat16 if size[0] % 2 == 0 else torch.float32]
    ours, theirs = lm.forward(text).logits, model(text).logits
    exact = model.double()(text).logits
    error, their_error = ((logits - exact).square().mean().sqrt() for logits in (ours, theirs))
    assert error < 0.7 * their_error
    if size == SIZES[0]:
        assert error < 0.02 * exact.std()


@pytest.mark.parametrize("kind", KINDS_OF_MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_8_bits_are_multiplied_as_such(kind: str, dtype: torch.dtype) -> None:
    """Guards the scales of rounded weights, and their biases."""
    model = random_model(kind, dtype=dtype)
    quantize(model, 8)
    lm, text = lm_of(model), tokens(40)
    assert lm._compute._model.layer[0].gate.kind == KINDS[torch.int8]
    assert lm.weight_bytes(model.lm_head.weight) < 1.2 * model.lm_head.weight.numel()
    expected = model(text).logits.float()
    limit = 1e-4 if dtype == torch.float32 else 0.1
    assert (lm.forward(text).logits - expected).square().mean().sqrt() < limit * expected.std()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_cut_into_passes_gives_the_same_bits(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """Guards the promise that is stronger than the one of `torch.compile`: there are no near-ties."""
    lm, text = lm_of(random_model(size=size, dtype=dtype)), tokens(30)
    whole = lm.forward(text).logits
    for widths in [(1,) * 30, (2,) * 15, (7, 1, 9, 13), (29, 1)]:
        empty_rows(lm, 1)
        parts = []
        for part in text.split(widths, dim=1):
            parts.append(lm.forward(part).logits)
            lm.cache.advance([part.shape[1]])
        assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_grows_changes_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rotations of positions that were not known at first."""
    text = tokens(150)
    whole = lm_of(random_model(dtype=dtype), width=150).forward(text).logits[0]
    monkeypatch.setattr(cached_rows, "FIRST_CAPACITY", 8)
    lm = lm_of(random_model(dtype=dtype), width=8)
    for start in range(0, 150, 5):
        assert torch.equal(lm.forward(text[:, start : start + 5]).logits[0], whole[start : start + 5])
        lm.cache.advance([5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_batch_do_not_see_each_other(dtype: torch.dtype) -> None:
    """Guards ragged batches: rows of other lengths, and places where a row has no token."""
    lm = lm_of(random_model(dtype=dtype))
    text, lengths = tokens(20, rows=3), [20, 3, 11]
    for row, length in enumerate(lengths):
        text[row, length:] = ABSENT
    empty_rows(lm, 3)
    together = lm.forward(text).logits
    lm.cache.advance(lengths)
    more = tokens(5, rows=3)
    later = lm.forward(more).logits
    for row, length in enumerate(lengths):
        empty_rows(lm, 1)
        assert torch.equal(lm.forward(text[row : row + 1, :length]).logits[0], together[row, :length])
        lm.cache.advance([length])
        assert torch.equal(lm.forward(more[row : row + 1]).logits[0], later[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_absent_tokens_are_not_computed(dtype: torch.dtype) -> None:
    """Guards what ragged rows are worth: of an absent token, in the middle of a tree too, no key and no value is
    written, its logits are 0, and all others are those of rows that are read alone."""
    lm = lm_of(random_model(dtype=dtype))
    text, parents = tokens(9, rows=4), torch.tensor([[-1, 0, 0, 1, 2, 2, 4, 4, 7]] * 4)
    for row, gone in enumerate(([5, 6, 7, 8], [1, 3], [*range(9)], [6])):
        text[row, gone] = ABSENT
    empty_rows(lm, 4)
    for part in (part for layer in lm.cache.storage for part in layer):
        part.fill_(torch.nan)
    together = lm.forward(text, parents, torch.tensor([[0, 8, 3, 8, 2]] * 4)).logits
    is_there = text != ABSENT
    for part in (part for layer in lm.cache.storage for part in layer):
        assert torch.equal(part[:, :9].isnan().flatten(2).all(2), ~is_there)
        assert torch.equal(part[:, :9].isnan().flatten(2).any(2), ~is_there)
    for row in range(4):
        for place, token in enumerate([0, 8, 3, 8, 2]):
            if not is_there[row, token]:
                assert not together[row, place].any()
                continue
            path = [token]
            while (up := int(parents[row, path[0]])) >= 0:
                path.insert(0, up)
            empty_rows(lm, 1)
            assert torch.equal(lm.forward(text[row, path][None]).logits[0, -1], together[row, place])


def test_what_follows_an_absent_token_is_absent() -> None:
    """Guards keys and values of earlier texts: they are where an absent token's would be. Nothing that follows it, of
    whatever depth, is computed, and what follows its parent is."""
    lm = lm_of(random_model())
    empty_rows(lm, 1)
    alone = lm.forward(torch.tensor([[3, 6]])).logits
    text, parents = torch.tensor([[3, ABSENT, 5, 7, 6]]), torch.tensor([[-1, 0, 1, 2, 0]])
    logits = lm.forward(text, parents).logits
    assert not logits[0, 1:4].any()
    assert torch.equal(logits[0, [0, 4]], alone[0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_a_tree_is_what_it_is_behind_its_ancestors_alone(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """Guards the order in which slots are seen: where in the cache an ancestor stands must not matter."""
    lm = lm_of(random_model(size=size, dtype=dtype))
    text, parents = tokens(10), torch.tensor([[-1, 0, 0, 1, 2, 2, 4, 4, 7, 3]])
    lm.forward(tokens(33))
    lm.cache.advance([33])
    tree = lm.forward(text, parents).logits
    for leaf in range(10):
        path = [leaf]
        while (parent := int(parents[0, path[0]])) >= 0:
            path.insert(0, parent)
        assert torch.equal(lm.forward(text[:, path]).logits[0, -1], tree[0, leaf])
    lm.forward(text, parents)
    lm.cache.accept_path([[0, 2, 4, 7, 8]])
    kept = lm.forward(text[:, 9:]).logits
    empty_rows(lm, 1)
    anew = lm.forward(torch.cat([tokens(33), text[:, [0, 2, 4, 7, 8, 9]]], dim=1)).logits
    assert torch.equal(kept, anew[:, -1:])


def test_more_tokens_than_slots_hurt_nobody() -> None:
    """Guards a live row beside one whose pending text has outgrown the cache: only the last slot may be hit."""
    lm = lm_of(random_model(), capacity=20, width=4)
    text = tokens(7)
    empty_rows(lm, 2)
    lm.prefill([[*text[0].tolist(), 3]] * 2)
    lm.prefill([tokens(150)[0].tolist(), tokens(2)[0].tolist()])
    beside = lm.forward(tokens(1).repeat(2, 1)).logits[1, 0]
    empty_rows(lm, 1)
    lm.prefill(torch.cat([text, tokens(2)[:, :1], tokens(1)], dim=1).tolist())
    assert torch.equal(lm.forward(tokens(1)).logits[0, 0], beside)


@pytest.mark.parametrize(
    ("text", "parents", "wanted"), [([5000], [-1], [0]), ([5], [0], [0]), ([5], [-1], [-2]), ([5], [-1], [1])]
)
def test_wrong_indices_are_refused(text: list[int], parents: list[int], wanted: list[int]) -> None:
    """Guards memory, and against a loop without end."""
    lm = lm_of(random_model())
    with pytest.raises(AssertionError, match="outside of its range"):
        lm.forward(torch.tensor([text]), torch.tensor([parents]), torch.tensor([wanted]))


def test_torchs_defaults_do_not_matter() -> None:
    """Guards memory where a user has set another default dtype."""
    lm, text = lm_of(random_model("qwen2")), tokens(9)
    expected = lm.forward(text).logits
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert torch.equal(lm.forward(text).logits, expected)
        assert torch.equal(lm_of(lm.model).forward(text).logits, expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_adapters_are_left_to_torch() -> None:
    """Guards models that have more weights than those of their layers."""
    model = random_model()
    tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert not can_serve(tuned.base_model.model)
    hooked = random_model()
    hooked.model.layers[0].register_forward_hook(lambda *_: None)
    assert not can_serve(hooked)


def test_a_smaller_cache_is_given_back_first() -> None:
    """Guards memory: two caches at once may not fit."""
    lm = lm_of(random_model())
    lm.forward(tokens(3))
    smaller = weakref.ref(lm.cache.storage[0][0])
    empty_rows(lm, 3)
    assert smaller() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_join_and_move_change_no_bit(dtype: torch.dtype) -> None:
    """Guards rows that are read while others wait, a cache that grows under them, and rows that fill holes."""
    lm, text = lm_of(random_model(dtype=dtype)), tokens(20, rows=4)
    alone = []
    for row in text:
        empty_rows(lm, 1)
        alone.append(lm.forward(row[None]).logits[0, 19])
    rows = text.tolist()
    empty_rows(lm, 2)
    lm.cache._largest = lm.cache._allocate(2, lm.cache._slots)  # so that more rows do not fit
    lm.prefill([rows[0][:10], rows[1][:7]])
    lm.cache.join(2)
    lm.prefill([[ABSENT], [ABSENT], rows[2][:2], rows[3][:19]])
    lm.cache.keep(torch.tensor([3, 1, 2]))
    last = lm.prefill([rows[3][18:], rows[1][6:], rows[2][1:]]).last
    found = lm.forward(torch.tensor(last)).logits[:, 0]
    assert all(torch.equal(one, alone[row]) for one, row in zip(found, (3, 1, 2), strict=True))


@pytest.mark.parametrize("inputs", [2, 30, 32, 34, 62, 64, 320, 368])
@pytest.mark.parametrize("outputs", [1, 63, 64, 130])
def test_products_of_bfloat16(inputs: int, outputs: int) -> None:
    """Guards tiles: inputs and outputs that do not fill them, more rows than they have, and bits that depend on the
    rows beside a row."""
    generator = torch.Generator().manual_seed(inputs * outputs)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    rows = torch.randn(41, inputs, generator=generator).bfloat16()
    packed = PackedMatrix([weight], [torch.ones(outputs)])
    whole = torch.empty(41, outputs)
    if not packed.multiply(rows, whole, 1):
        pytest.skip("this CPU has no products of bfloat16")
    expected = rows.double() @ weight.double().T + 1
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-4 * inputs**0.5)
    for sizes, threads in (([1] * 41, 1), ([16, 25], 2), ([17, 15, 9], 1), ([33, 8], 2)):
        parts = []
        for some in rows.split(sizes):
            parts.append(torch.empty(len(some), outputs))
            packed.multiply(some.contiguous(), parts[-1], threads)
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    """Guards texts against the number of cores."""
    lm, text = lm_of(random_model(size=SIZES[2], dtype=dtype)), tokens(9)
    found = []
    for threads in (1, 2, 3, 7):
        lm._compute.threads = threads
        found.append(lm.forward(text).logits)
    assert all(torch.equal(one, other) for one, other in itertools.pairwise(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_wanted_logits_are_computed(dtype: torch.dtype) -> None:
    """Guards the drafter's passes, which want few of many."""
    lm, text = lm_of(random_model(dtype=dtype)), tokens(12)
    whole, places = lm.forward(text).logits, torch.tensor([[11, 3, 3]])
    assert torch.equal(lm.forward(text, logit_rows=places).logits, whole[:, places[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_are_read_in_chunks(dtype: torch.dtype) -> None:
    """Guards prefill: what is read without logits must be in the cache."""
    lm, text = lm_of(random_model(dtype=dtype), width=200), tokens(150)
    whole = lm.forward(text).logits
    empty_rows(lm, 1)
    last = lm.prefill(text.tolist()).last
    assert torch.equal(lm.forward(torch.tensor(last)).logits[0, 0], whole[0, -1])


def test_a_full_cache_is_not_overrun() -> None:
    """Guards memory after the cache: a row that has ended is read on with the others."""
    lm = lm_of(random_model(), capacity=20, width=4)
    empty_rows(lm, 2)
    lm.cache._set_lengths([20, 4])
    for _ in range(5):
        assert lm.forward(tokens(4, rows=2)).logits.isfinite().all()
        lm.cache.advance([4, 0])


@pytest.mark.parametrize(
    ("dtype", "change"),
    [
        (torch.float64, {}),
        (torch.float16, {}),
        (torch.float32, {"hidden_act": "gelu"}),
        (torch.float32, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
def test_what_it_cannot_compute_is_left_to_torch(dtype: torch.dtype, change: dict[str, object]) -> None:
    """Guards models that the C++ would compute wrongly; with angles that change, torch would too."""
    model = random_model(dtype=dtype)
    assert can_serve(random_model())
    for name, value in change.items():
        setattr(model.config, name, value)
    assert not can_serve(model)
    if "rope_parameters" in change:
        with pytest.raises(ValueError, match="'dynamic', which is not supported"):
            CausalLM(model, vocab_size=60, compiled=True)
    else:
        assert isinstance(CausalLM(model, vocab_size=60, compiled=True)._compute, CompiledPass)


def test_other_systems_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users of other systems against a warning at every start: their compilers bring no OpenMP."""
    monkeypatch.setattr("sys.platform", "darwin")
    assert not can_serve(random_model())


def test_a_model_that_computes_something_else_is_found_out() -> None:
    """Guards models whose config does not say everything: the pass is compared with the model's own."""
    model = random_model()
    model.model.layers[1].self_attn.scaling *= 2
    with pytest.raises(WrongPassError, match="formula"):
        NativePass(model)
    with pytest.warns(
        UserWarning, match=r"failed its self-check on this model \(formula .* about [\d.e+]+ times slower"
    ):
        lm = CausalLM(model, vocab_size=60, compiled=True)
    assert isinstance(lm._compute, CompiledPass) and "please report this" in lm.refusals[0]
    assert CausalLM(random_model(), vocab_size=60).refusals == []


def test_numbers_that_overflow_stay_so() -> None:
    """Guards against an exponential that makes an ordinary number of an impossible one."""
    model = random_model()
    model.model.embed_tokens.weight[50] = math.nan
    lm = lm_of(model)
    assert lm.forward(torch.tensor([[3, 50, 4]])).logits[0, 1:].isnan().all()
