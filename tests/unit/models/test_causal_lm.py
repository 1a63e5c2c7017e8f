"""Our forward pass against a fresh pass of the same `transformers` model, in float64."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.models import cached_rows, causal_lm, kv_cache
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import eager
from paradraft.models.forward.eager import NotFiniteError
from paradraft.models.kv_cache import SlotCache
from paradraft.ragged import from_lists
from paradraft.tree import ABSENT
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import prefilled
from tests.support.trees import path_to, random_parents

PROMPTS = [[7], [3, 1, 4, 1, 5], [2, 0, 9, 9, 0, 1, 2, 3, 4]]


def causal(*, llama: bool = False, **settings: int) -> CausalLM:
    return CausalLM(tiny_model(3, llama=llama), vocab_size=VOCAB, compiled=False, **{"width": 16, **settings})


@torch.inference_mode()
def fresh(lm: CausalLM, tokens: list[int]) -> torch.Tensor:
    """Logits after the last of these tokens."""
    return lm.model(torch.tensor([tokens])).logits[0, -1, :VOCAB]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def random_trees(seed: int, nodes: int) -> tuple[list[list[int]], list[list[int]]]:
    """Three trees after a root, node 0, as `Target.forward` hands them over."""
    chooser = random.Random(seed)
    parents = [[ABSENT, *(parent + 1 for parent in random_parents(seed * 10 + row, nodes - 1))] for row in range(3)]
    return [[chooser.randrange(VOCAB) for _ in range(nodes)] for _ in range(3)], parents


@pytest.mark.parametrize("llama", [False, True])
@pytest.mark.parametrize("pad_to", [1, 12])
@pytest.mark.parametrize("seed", [0, 1])
def test_tree_and_kept_path_equal_a_fresh_prefill(llama: bool, pad_to: int, seed: int) -> None:
    """Guards the cache: nodes rotate by depth, see their ancestors only, and an accepted path is moved together."""
    lm = causal(llama=llama, pad_to=pad_to)
    texts = [list(row) for row in PROMPTS]
    last_B1 = prefilled(lm, texts)
    assert last_B1.flatten().tolist() == [row[-1] for row in texts]
    for turn in range(3):
        tokens, parents = random_trees(seed * 3 + turn, nodes=7)
        for row, text in enumerate(texts):
            tokens[row][0] = text[-1]
        logits = lm.forward(torch.tensor(tokens), torch.tensor(parents)).logits
        paths = []
        for row, text in enumerate(texts):
            for node in range(7):
                read = [tokens[row][i] for i in path_to(parents[row], node)]
                assert_close(logits[row, node], fresh(lm, text[:-1] + read))
            paths.append(path_to(parents[row], random.Random(turn * 3 + row).randrange(7)))
        lm.cache.accept_path(paths)
        for row, path in enumerate(paths):
            texts[row] = texts[row][:-1] + [tokens[row][node] for node in path] + [turn]
        assert lm.cache.lengths == [len(text) - 1 for text in texts]
        assert_cache_is_fresh(lm, texts)


@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(deadline=None, max_examples=25)
def test_any_sequence_of_trees_and_leaving_rows_equals_fresh_passes(seed: int, nodes: int) -> None:
    """Guards masks and cache moves together: random trees, random accepted paths, rows that leave in between."""
    chooser = random.Random(seed)
    lm = causal()
    texts = [[chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 30))] for _ in range(3)]
    prefilled(lm, texts)
    for _ in range(3):
        shapes = [[ABSENT, *(parent + 1 for parent in random_parents(chooser.randrange(99), nodes - 1))] for _ in texts]
        tokens = [[text[-1], *(chooser.randrange(VOCAB) for _ in range(nodes - 1))] for text in texts]
        logits = lm.forward(torch.tensor(tokens), torch.tensor(shapes)).logits
        paths = []
        for row, text in enumerate(texts):
            last = chooser.randrange(nodes)
            paths.append(path_to(shapes[row], last))
            read = [tokens[row][node] for node in paths[row]]
            assert_close(logits[row, last], fresh(lm, text[:-1] + read))
            texts[row] = text[:-1] + read + [chooser.randrange(VOCAB)]
        lm.cache.accept_path(paths)
        staying = [row for row in range(len(texts)) if chooser.random() < 0.7] or [0]
        texts = [texts[row] for row in staying]
        lm.cache.keep(torch.tensor(staying))
        assert lm.cache.lengths == [len(text) - 1 for text in texts]


def assert_cache_is_fresh(lm: CausalLM, texts: list[list[int]]) -> None:
    other = CausalLM(lm.model, vocab_size=VOCAB, compiled=False)
    for row, text in enumerate(texts):
        prefilled(other, [text])
        slots = len(text) - 1
        for layer in range(2):
            for ours, theirs in zip(cached(lm, layer, slots), cached(other, layer, slots), strict=True):
                assert_close(ours[row], theirs[0])


def cached(lm: CausalLM, layer: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B, H, slots, D]` keys and values: what a pass of no tokens sees."""
    rows = len(lm.cache.lengths)
    nothing = torch.empty(rows, 2, 0, 8, dtype=torch.float64)
    return SlotCache(lm.cache.storage, torch.empty(rows, 0, dtype=torch.long), slots).update(nothing, nothing, layer)


@pytest.mark.parametrize("llama", [False, True])
def test_ragged_chain_equals_fresh_passes(llama: bool) -> None:
    """Guards rows of different lengths in one pass: `ABSENT` at the end is neither kept nor seen."""
    lm = causal(llama=llama)
    prefilled(lm, PROMPTS)
    more = [[row[-1], *new] for row, new in zip(PROMPTS, [[5, 6, 7], [], [8]], strict=True)]
    tokens = from_lists(more)
    number_B = (tokens != ABSENT).sum(1)
    logits = lm.forward(tokens, logit_rows=number_B[:, None] - 1).logits
    assert logits.shape == (3, 1, VOCAB)
    lm.cache.advance(number_B.tolist())
    texts = [row[:-1] + new for row, new in zip(PROMPTS, more, strict=True)]
    again = lm.forward(torch.tensor([[11], [12], [13]])).logits
    for row, text in enumerate(texts):
        assert_close(logits[row, 0], fresh(lm, text))
        assert_close(again[row, 0], fresh(lm, [*text, 11 + row]))


def test_rewind_forgets_what_came_after() -> None:
    """Guards rollback: rejected tokens must not be seen by later passes, at another length in every row."""
    lm = causal()
    prefilled(lm, PROMPTS)
    kept = lm.cache.lengths
    lm.forward(torch.tensor([[1, 2, 3, 4]] * 3))
    lm.cache.advance([4, 4, 4])
    lm.cache.rollback([length + stay for length, stay in zip(kept, [0, 2, 4], strict=True)])
    logits = lm.forward(torch.tensor([[20, 21]] * 3)).logits
    for row, (prompt, stay) in enumerate(zip(PROMPTS, [0, 2, 4], strict=True)):
        assert_close(logits[row, 1], fresh(lm, [*prompt[:-1], *[1, 2, 3, 4][:stay], 20, 21]))
    with pytest.raises(AssertionError):
        lm.cache.rollback([length + 1 for length in lm.cache.lengths])


def test_nothing_is_kept_before_keep() -> None:
    """Guards against a pass that changes what the next one sees although nothing was committed."""
    lm = causal()
    prefilled(lm, PROMPTS)
    first = lm.forward(torch.tensor([[1, 2, 3]] * 3)).logits
    lm.forward(torch.tensor([[9, 9, 9, 9, 9]] * 3), torch.tensor([[-1, -1, 0, 1, -1]] * 3))
    assert torch.equal(lm.forward(torch.tensor([[1, 2, 3]] * 3)).logits, first)


def test_forbidden_tokens_are_never_chosen() -> None:
    """Guards against a mask token in the text; other logits stay, and ids beyond the vocabulary are no error."""
    lm = causal()
    prefilled(lm, [[1, 2]])
    before = lm.forward(torch.tensor([[2, 3]])).logits
    lm.forbid([5])
    lm.forbid([5, VOCAB + 3])
    after = lm.forward(torch.tensor([[2, 3]])).logits.clone()
    assert after.shape[-1] == VOCAB
    assert (after[..., 5] == -torch.inf).all()
    after[..., 5] = before[..., 5]
    assert torch.equal(after, before)


def test_prompts_are_read_in_chunks_across_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long prompts: rows that end in an early chunk wait, and attention grows past its first bucket."""
    monkeypatch.setattr(causal_lm, "PREFILL_CHUNK", 24)
    lm = causal()
    chooser = random.Random(0)
    rows = [[chooser.randrange(VOCAB) for _ in range(length)] for length in (1, 25, 100)]
    last_B1 = prefilled(lm, rows)
    assert lm.cache.lengths == [0, 24, 99]
    logits = lm.forward(last_B1).logits
    for row, text in enumerate(rows):
        assert_close(logits[row, 0], fresh(lm, text))


def test_a_second_start_forgets_the_first() -> None:
    """Guards against keys of the last request seen by the next one, with another number of rows too."""
    lm = causal()
    for rows in (PROMPTS, [[1, 2, 3]], [[4]], PROMPTS):
        logits = lm.forward(prefilled(lm, rows)).logits
        for row, text in enumerate(rows):
            assert_close(logits[row, 0], fresh(lm, text))


def test_capacity_is_checked_and_can_be_filled() -> None:
    """Guards against room that the model does not have, and against room that cannot be used."""
    with pytest.raises(ValueError, match="capacity=129"):
        causal(capacity=129)
    with pytest.raises(ValueError, match="capacity=0"):
        causal(capacity=0)
    lm = causal(capacity=20)
    full = prefilled(lm, [list(range(20))])
    logits = lm.forward(torch.cat([full, torch.ones(1, 15, dtype=torch.long)], dim=1)).logits
    assert_close(logits[0, 0], fresh(lm, list(range(20))))
    with pytest.raises(AssertionError):
        lm.forward(torch.ones(1, 17, dtype=torch.long))


def test_sliding_windows_are_refused() -> None:
    """Guards against silently wrong attention in models that this cache cannot serve."""
    model = tiny_model(0)
    model.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="sliding-window"):
        CausalLM(model, vocab_size=VOCAB, compiled=False)


def test_an_ended_row_may_outgrow_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a crash, and against writing into the rows beside it, where a row that has ended at the capacity
    is read on, by more tokens than the cache has to spare, until its batch has ended."""
    for module in (cached_rows, eager):
        monkeypatch.setattr(module, "BUCKET", 16)
    lm, alone = causal(capacity=40), causal(capacity=40)
    prefilled(lm, [[7] * 40, [3]])
    lm.prefill([[5] * 36, [3, *[9] * 35]])
    prefilled(alone, [[3, *[9] * 35]])
    for one in (lm, alone):
        assert one.cache.lengths[-1] == 35
    assert_close(lm.forward(torch.tensor([[1], [9]])).logits[1], alone.forward(torch.tensor([[9]])).logits[0])


def test_a_cache_that_grows_holds_what_it_held() -> None:
    """Guards rows that join when the memory is full: the others' keys come along, and the old memory is not written
    or read any more; with as many rows as there were at most, none is taken."""
    lm = causal()
    texts, memory = [list(row) for row in PROMPTS], list[int]()
    prefilled(lm, texts)
    for joining in ([[5, 5]], [[1], [6] * 40], []):
        before = lm.cache.storage
        lm.cache.join(len(joining))
        lm.prefill([[ABSENT]] * len(texts) + joining)
        texts += joining
        if joining:
            for keys, values in before:
                keys.fill_(torch.nan)
                values.fill_(torch.nan)
        memory.append(lm.cache.storage[0][0].data_ptr())
        assert len(lm.cache.storage[0][0]) == len(texts)
        assert_cache_is_fresh(lm, texts)
        logits = lm.forward(torch.tensor([[text[-1]] for text in texts])).logits
        for row, text in enumerate(texts):
            assert_close(logits[row, 0], fresh(lm, text))
    assert memory[2] == memory[1] != memory[0]
    lm.cache.keep(torch.tensor([5, 1]))
    texts = [texts[5], texts[1]]
    lm.cache.join(4)
    lm.prefill([[ABSENT]] * 2 + PROMPTS + [[7, 7]])
    assert lm.cache.storage[0][0].data_ptr() == memory[2]
    assert_cache_is_fresh(lm, [*texts, *PROMPTS, [7, 7]])


def test_a_cache_grows_with_its_longest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards long texts against a cache that begins small: while a prompt is read, in passes, and for kept rows; and
    the memory that is allocated for short ones."""
    for module in (cached_rows, eager):
        monkeypatch.setattr(module, "BUCKET", 16)
    monkeypatch.setattr(cached_rows, "FIRST_CAPACITY", 8)
    lm = causal(width=8)
    texts, sizes = [[row % VOCAB for row in range(20)], [3, 1]], list[int]()
    prefilled(lm, [[2]])
    sizes.append(kv_cache.slots_of(lm.cache.storage))
    prefilled(lm, texts)
    sizes.append(kv_cache.slots_of(lm.cache.storage))
    for turn in range(40):
        logits = lm.forward(torch.tensor([[text[-1]] for text in texts])).logits
        for row, text in enumerate(texts):
            assert_close(logits[row, 0], fresh(lm, text))
            text.append((turn + row) % VOCAB)
        lm.cache.advance([1, 1])
    assert_cache_is_fresh(lm, texts)
    sizes.append(kv_cache.slots_of(lm.cache.storage))
    assert sizes == [16, 32, 128]
    saved, other = lm.cache.save(0, 50), causal(width=8)
    other.start()
    other.cache.join(1)
    assert other.cache.restore(0, saved, 50) == 50
    assert_close(other.forward(torch.tensor([texts[0][50:51]])).logits[0, 0], fresh(lm, texts[0][:51]))
    full = prefilled(lm, [[5] * 128])
    assert_close(lm.forward(full).logits[0, 0], fresh(lm, [5] * 128))
    assert kv_cache.slots_of(lm.cache.storage) == 128 + 16


def test_a_cache_that_cannot_grow_is_said_and_can_be_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a service that is asked for too much at once: the next, smaller batch finds a cache."""
    lm = causal()
    prefilled(lm, PROMPTS)
    with monkeypatch.context() as patched:
        patched.setattr(kv_cache, "free_bytes", lambda _: 1.0)
        with pytest.raises(ValueError, match="a cache for 4 rows"):
            lm.cache.join(1)
    logits = lm.forward(prefilled(lm, PROMPTS)).logits
    for row, text in enumerate(PROMPTS):
        assert_close(logits[row, 0], fresh(lm, text))


def test_rows_move_into_holes_with_their_texts() -> None:
    """Guards rows that fill the places of others: also where a long one moves into a short one's place, where two
    change places, and where a row that was there before joins into the place after."""
    lm = causal()
    texts = [[7], [3, 1, 4, 1, 5], [2, 0, 9], list(range(30)), [8] * 12]
    prefilled(lm, texts)
    for order in ([3, 4, 2], [1, 0, 2], [2, 1]):
        lm.cache.keep(torch.tensor(order))
        texts = [texts[row] for row in order]
        assert lm.cache.lengths == [len(text) - 1 for text in texts]
        assert_cache_is_fresh(lm, texts)
    lm.cache.join(1)
    lm.prefill([[ABSENT], [ABSENT], [6, 5, 4]])
    texts.append([6, 5, 4])
    logits = lm.forward(torch.tensor([[text[-1]] for text in texts])).logits
    for row, text in enumerate(texts):
        assert_close(logits[row, 0], fresh(lm, text))


def test_rows_that_join_are_read_alone() -> None:
    """Guards the time of the others: rows of which nothing is to be read are not in the pass, if none before them
    is; the read rows need not be new."""
    lm = causal()
    prefilled(lm, PROMPTS)
    lm.cache.join(2)
    before = lm.passes.copy()
    assert lm.prefill([[9], [9], [9], [1, 2, 3], [4]]).last == [[9], [9], [9], [3], [4]]
    (read,) = (lm.passes - before).elements()
    assert (read.rows, read.tokens, read.logits) == (2, 2, 0)
    assert lm.cache.lengths == [0, 4, 8, 2, 0]
    assert lm.prefill([[9], [5, 6], [9], [9], [7, 8]]).last[1] == [6]
    assert lm.cache.lengths == [0, 5, 8, 2, 1]
    assert_cache_is_fresh(lm, [[7], [*PROMPTS[1][:-1], 5, 6], PROMPTS[2], [1, 2, 3], [7, 8]])


def test_the_row_whose_states_are_no_numbers_is_named() -> None:
    """Guards the other requests of a batch: the number is that of the row in the batch, not among those that join."""
    lm = causal()
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[50] = torch.nan
    prefilled(lm, PROMPTS)
    lm.cache.join(2)
    with pytest.raises(NotFiniteError) as caught:
        lm.prefill([[ABSENT]] * 3 + [[1, 2, 3], [4, 50, 5]])
    assert caught.value.row == 4


def test_reserved_tokens_are_not_chosen_until_others_are() -> None:
    """Guards one target of two drafters: what is forbidden for good stays so."""
    lm = causal()
    last = prefilled(lm, [[1, 2]])
    lm.forbid([5])
    for reserved in ([6, VOCAB + 3], [7], []):
        lm.reserve(reserved)
        wanted = {5, *reserved} - {VOCAB + 3}
        assert set((lm.forward(last).logits[0, 0] == -torch.inf).nonzero().flatten().tolist()) == wanted
