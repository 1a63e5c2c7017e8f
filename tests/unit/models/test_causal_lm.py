"""Our forward pass against a fresh pass of the same `transformers` model, in float64."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.core import Prompt
from paradraft.models import causal_lm
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward import eager
from paradraft.models.kv_cache import SlotCache
from paradraft.sampling_params import GREEDY
from paradraft.tree import ABSENT
from tests.conftest import VOCAB, tiny_model
from tests.support.trees import path_to, random_parents

PROMPTS = [[7], [3, 1, 4, 1, 5], [2, 0, 9, 9, 0, 1, 2, 3, 4]]


def causal(*, llama: bool = False, **settings: int) -> CausalLM:
    return CausalLM(tiny_model(3, llama=llama), vocab_size=VOCAB, compiled=False, **{"width": 16, **settings})


def prompt_of(rows: list[list[int]]) -> Prompt:
    width = max(map(len, rows))
    tokens = torch.tensor([row + [ABSENT] * (width - len(row)) for row in rows])
    return Prompt(tokens=tokens, sampling=(GREEDY,) * len(rows))


@torch.inference_mode()
def fresh(lm: CausalLM, tokens: list[int]) -> torch.Tensor:
    """Logits after the last of these tokens."""
    return lm.model(torch.tensor([tokens])).logits[0, -1, :VOCAB]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def random_trees(seed: int, nodes: int) -> tuple[list[list[int]], list[list[int]]]:
    """Three trees behind a root, node 0, as `Target.forward` hands them over."""
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
    last_B1 = lm.start(prompt_of(texts)).last
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
        lm.accept_path(paths)
        for row, path in enumerate(paths):
            texts[row] = texts[row][:-1] + [tokens[row][node] for node in path] + [turn]
        assert lm.lengths == [len(text) - 1 for text in texts]
        assert_cache_is_fresh(lm, texts)


@given(st.integers(0, 2**32), st.integers(1, 9))
@settings(deadline=None, max_examples=25)
def test_any_sequence_of_trees_and_leaving_rows_equals_fresh_passes(seed: int, nodes: int) -> None:
    """Guards masks and cache moves together: random trees, random accepted paths, rows that leave in between."""
    chooser = random.Random(seed)
    lm = causal()
    texts = [[chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 30))] for _ in range(3)]
    lm.start(prompt_of(texts))
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
        lm.accept_path(paths)
        staying = [row for row in range(len(texts)) if chooser.random() < 0.7] or [0]
        texts = [texts[row] for row in staying]
        lm.keep_rows(torch.tensor(staying))
        assert lm.lengths == [len(text) - 1 for text in texts]


def assert_cache_is_fresh(lm: CausalLM, texts: list[list[int]]) -> None:
    other = CausalLM(lm.model, vocab_size=VOCAB, compiled=False)
    for row, text in enumerate(texts):
        other.start(prompt_of([text]))
        slots = len(text) - 1
        for layer in range(2):
            for ours, theirs in zip(cached(lm, layer, slots), cached(other, layer, slots), strict=True):
                assert_close(ours[row], theirs[0])


def cached(lm: CausalLM, layer: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[B, H, slots, D]` keys and values: what a pass of no tokens sees."""
    rows = len(lm.lengths)
    nothing = torch.empty(rows, 2, 0, 8, dtype=torch.float64)
    return SlotCache(lm._storage, torch.empty(rows, 0, dtype=torch.long), slots).update(nothing, nothing, layer)


@pytest.mark.parametrize("llama", [False, True])
def test_ragged_chain_equals_fresh_passes(llama: bool) -> None:
    """Guards rows of different lengths in one pass: `ABSENT` at the end is neither kept nor seen."""
    lm = causal(llama=llama)
    lm.start(prompt_of(PROMPTS))
    more = [[row[-1], *new] for row, new in zip(PROMPTS, [[5, 6, 7], [], [8]], strict=True)]
    tokens = prompt_of(more).tokens
    number_B = (tokens != ABSENT).sum(1)
    logits = lm.forward(tokens, logit_rows=number_B[:, None] - 1).logits
    assert logits.shape == (3, 1, VOCAB)
    lm.advance(number_B.tolist())
    texts = [row[:-1] + new for row, new in zip(PROMPTS, more, strict=True)]
    again = lm.forward(torch.tensor([[11], [12], [13]])).logits
    for row, text in enumerate(texts):
        assert_close(logits[row, 0], fresh(lm, text))
        assert_close(again[row, 0], fresh(lm, [*text, 11 + row]))


def test_rewind_forgets_what_came_after() -> None:
    """Guards rollback: rejected tokens must not be seen by later passes, at another length in every row."""
    lm = causal()
    lm.start(prompt_of(PROMPTS))
    kept = lm.lengths
    lm.forward(torch.tensor([[1, 2, 3, 4]] * 3))
    lm.advance([4, 4, 4])
    lm.rollback([length + stay for length, stay in zip(kept, [0, 2, 4], strict=True)])
    logits = lm.forward(torch.tensor([[20, 21]] * 3)).logits
    for row, (prompt, stay) in enumerate(zip(PROMPTS, [0, 2, 4], strict=True)):
        assert_close(logits[row, 1], fresh(lm, [*prompt[:-1], *[1, 2, 3, 4][:stay], 20, 21]))
    with pytest.raises(AssertionError):
        lm.rollback([length + 1 for length in lm.lengths])


def test_nothing_is_kept_before_keep() -> None:
    """Guards against a pass that changes what the next one sees although nothing was committed."""
    lm = causal()
    lm.start(prompt_of(PROMPTS))
    first = lm.forward(torch.tensor([[1, 2, 3]] * 3)).logits
    lm.forward(torch.tensor([[9, 9, 9, 9, 9]] * 3), torch.tensor([[-1, -1, 0, 1, -1]] * 3))
    assert torch.equal(lm.forward(torch.tensor([[1, 2, 3]] * 3)).logits, first)


def test_forbidden_tokens_are_never_chosen() -> None:
    """Guards against a mask token in the text; other logits stay, and ids beyond the vocabulary are no error."""
    lm = causal()
    lm.start(prompt_of([[1, 2]]))
    before = lm.forward(torch.tensor([[2, 3]])).logits
    lm.forbid(5)
    lm.forbid(5)
    lm.forbid(VOCAB + 3)
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
    last_B1 = lm.start(prompt_of(rows)).last
    assert lm.lengths == [0, 24, 99]
    logits = lm.forward(last_B1).logits
    for row, text in enumerate(rows):
        assert_close(logits[row, 0], fresh(lm, text))


def test_a_second_start_forgets_the_first() -> None:
    """Guards against keys of the last request seen by the next one, with another number of rows too."""
    lm = causal()
    for rows in (PROMPTS, [[1, 2, 3]], [[4]], PROMPTS):
        logits = lm.forward(lm.start(prompt_of(rows)).last).logits
        for row, text in enumerate(rows):
            assert_close(logits[row, 0], fresh(lm, text))


def test_capacity_is_checked_and_can_be_filled() -> None:
    """Guards against prompts that overrun the cache, and against room that cannot be used."""
    with pytest.raises(ValueError, match="capacity=129"):
        causal(capacity=129)
    with pytest.raises(ValueError, match="capacity=0"):
        causal(capacity=0)
    lm = causal(capacity=20)
    with pytest.raises(ValueError, match="21 tokens, the model has room for 20"):
        lm.start(prompt_of([[1] * 21]))
    full = lm.start(prompt_of([list(range(20))])).last
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
    for module in (causal_lm, eager):
        monkeypatch.setattr(module, "BUCKET", 16)
    lm, alone = causal(capacity=40), causal(capacity=40)
    lm.start(prompt_of([[7] * 40, [3]]))
    lm.prefill(torch.tensor([[5] * 36, [3, *[9] * 35]]))
    alone.start(prompt_of([[3, *[9] * 35]]))
    for one in (lm, alone):
        assert one.lengths[-1] == 35
    assert_close(lm.forward(torch.tensor([[1], [9]])).logits[1], alone.forward(torch.tensor([[9]])).logits[0])
