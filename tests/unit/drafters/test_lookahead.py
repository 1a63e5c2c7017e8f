from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paradraft.core import Committed, Draft
from paradraft.drafters.lookahead import Config, LookaheadDrafter, Pool, draft_tree, new_column
from paradraft.tree import ABSENT
from paradraft.verify.match import accepted_path
from tests.support.decoding import committed, requests, started
from tests.support.trees import path_to

Target = Callable[[list[int]], int]
"""The token that follows a text."""
N, W, G = 4, 3, 2
SMALL = Config(ngram=N, window=W, guesses=G)


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """What each node of a draft is after: the tokens from the root to it."""
    return [tuple(tokens[i] for i in path_to(parents, node)) for node in range(len(tokens))]


def target(seed: int, vocabulary: int = 8) -> Target:
    """A text that repeats itself now and then: a token follows from the two before it."""
    return lambda text: random.Random(f"{seed} {text[-2:]}").randrange(vocabulary)


def drawn_by(says: Target, text: list[int], tokens: list[int], parents: list[int]) -> list[int]:
    """The target's own tokens after the root and after each node."""
    return [
        ABSENT if node >= 0 and tokens[node] == ABSENT else says(text + [tokens[i] for i in path_to(parents, node)])
        for node in range(-1, len(tokens))
    ]


def play(drafter: LookaheadDrafter, says: Target, *, text: list[int], depth: int | None = None) -> Draft:
    """One round of one row: the drafter's draft, cut to a depth, is verified and committed, and the text goes on."""
    draft = drafter.propose([1 if depth is None else depth])
    if depth is not None:
        depths = [[len(path_to(row, node)) for node in range(len(row))] for row in draft.parents.tolist()]
        draft = draft.where(torch.tensor(depths).view(draft.tokens.shape) <= depth)
    (tokens,), (parents,) = draft.tokens.tolist(), draft.parents.tolist()
    drawn = drawn_by(says, text, tokens, parents)
    path = accepted_path(tokens, parents, drawn)
    text += [*(tokens[node] for node in path), drawn[path[-1] + 1 if path else 0]]
    drafter.commit(Committed(tokens=[text[-len(path) - 1 :]], drawn=[drawn]))
    return draft


def drafting(text: list[int], config: Config = SMALL) -> LookaheadDrafter:
    drafter = LookaheadDrafter(config)
    started(drafter, [text])
    return drafter


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), max_size=4),
)
@settings(deadline=None, max_examples=200)
def test_the_tree_has_the_paths_of_window_and_guesses(columns: list[list[int]], guesses: list[list[int]]) -> None:
    """Guards against a level that hangs on another column, a column that sees later levels of the one before it, and
    siblings that hold the same token, of which only one would be verified."""
    expected = set[tuple[int, ...]]()
    for j in range(len(columns)):
        for level in range(3):
            expected.add(tuple([columns[before][0] for before in range(j + 1)] + columns[j][1 : level + 1]))
    for guess in guesses:
        for size in range(3):
            expected.add(tuple(guess[: size + 1]))
    tokens, parents, ends = draft_tree(columns, guesses)
    found = paths_of(tokens, parents)
    assert len(found) == len(set(found)) and set(found) == expected
    assert all(parent < node for node, parent in enumerate(parents))
    for j, end in enumerate(ends):
        assert found[end] == (*(column[0] for column in columns[:j]), *columns[j])


def test_a_window_becomes_what_the_target_says_of_it() -> None:
    """Guards the window and the pool against a plain reading of the algorithm, from round to round, whatever was
    accepted: each column is the one that stood a position before it, without its first token and with the target's own
    after its last; what the text has passed is gone, and what is new begins with the text."""
    accepted = set[int]()
    for seed in range(12):
        says, text = target(seed), [seed % 8, 1, 2, 3, 5]
        drafter = drafting(text)
        window: dict[int, list[int]] = {}
        ngrams: list[list[int]] = []
        for _ in range(30):
            before = list(text)
            for position in range(len(text), len(text) + W):
                window.setdefault(position, new_column(text, position, N - 1))
            expected = set[tuple[int, ...]]()
            following: dict[int, list[int]] = {}
            for position in range(len(text), len(text) + W):
                firsts = [window[earlier][0] for earlier in range(len(text), position)]
                for level in range(N - 1):
                    expected.add((*firsts, *window[position][: level + 1]))
                own = says(text + firsts + window[position])
                following[position + 1] = [*window[position][1:], own]
                ngrams.append([*window[position], own])
            known = ngrams[: len(ngrams) - W]
            latest: list[list[int]] = []
            for ngram in reversed(known):
                if ngram[0] == text[-1] and ngram not in latest:
                    latest.append(ngram)
            for ngram in latest[:G]:
                for level in range(1, N):
                    expected.add(tuple(ngram[1 : level + 1]))
            draft = play(drafter, says, text=text)
            assert set(paths_of(draft.tokens[0].tolist(), draft.parents[0].tolist())) == expected
            accepted.add(len(text) - len(before) - 1)
            window = {position: column for position, column in following.items() if position >= len(text)}
    assert {0, 1, 2, 3} <= accepted


def test_every_draft_fits_what_the_config_says() -> None:
    """Guards the width of passes and K, which are taken from the settings alone: no draft is larger or deeper."""
    for config in (Config(), SMALL, Config(ngram=2, window=1, guesses=1), Config(ngram=2, window=5, guesses=3)):
        says, text, sizes, depths = target(3, 5), [1, 2, 3], [], []
        drafter = drafting(text, config)
        for _ in range(40):
            draft = play(drafter, says, text=text)
            sizes.append(draft.tokens.shape[1])
            depths.append(max(map(len, paths_of(draft.tokens[0].tolist(), draft.parents[0].tolist()))))
        assert drafter.tree == config.tree
        assert max(sizes) <= config.tree.nodes
        assert max(depths) == config.tree.depth
    assert (Config().tree.nodes, Config().tree.depth) == (14 * 4, 7 + 5 - 2)


def test_a_column_that_is_cut_stays_where_it_is() -> None:
    """Guards against tokens of another node, or of none: a column whose end is too deep does not move, and is read
    again, unless the one before it has come to its position."""
    says, text = target(1), [1, 2, 3, 4, 6]
    drafter, columns = drafting(text), {at: new_column(text, at, N - 1) for at in (5, 6, 7)}
    # The last tokens of the three columns are 3, 4 and 5 deep.
    own = says([*text, *columns[5]])
    play(drafter, says, text=text, depth=3)
    assert len(text) == 6
    (row,) = drafter._rows
    assert row.columns == {6: [*columns[5][1:], own], 7: columns[7]}
    assert [row.pool.after(token) for token in range(8)].count([]) == 7
    assert row.pool.after(columns[5][0]) == [(*columns[5][1:], own)]


def test_rounds_without_a_draft_leave_the_window_where_it_is() -> None:
    """Guards rows that draft nothing for some rounds: what they had goes on until the text has passed it."""
    says, text = target(5), [1, 2, 3, 4]
    drafter = drafting(text)
    for _ in range(4):
        play(drafter, says, text=text)
    (row,) = drafter._rows
    columns, pooled = dict(row.columns), row.pool.after(text[-1])
    assert drafter.propose([0]).tokens.shape == (1, 0)
    drafter.commit(Committed(tokens=[[7]], drawn=[[7]]))
    drafter.commit(committed([6]))
    assert row.columns == {position: column for position, column in columns.items() if position > len(text) + 1}
    assert len(row.columns) < len(columns) and row.pool.after(text[-1]) == pooled
    assert row.text == [*text, 7, 6]
    assert drafter.propose([5]).tokens.shape[1] > W


def test_what_a_processor_forbids_everywhere_is_no_token() -> None:
    """Guards drafts against -2, which stands where the target could choose no token: it is none to draft either."""
    drafter = drafting([1, 2, 3])
    for _ in range(3):
        tokens = drafter.propose([5]).tokens
        assert bool((tokens >= 0).all())
        drafter.commit(Committed(tokens=[[4]], drawn=[[-2] * (tokens.shape[1] + 1)]))


def test_rows_come_and_go() -> None:
    """Guards windows and pools of rows that join later, move, or draft nothing beside others: each row drafts as if it
    were alone."""
    says, prompts = target(2), [[1, 2, 3], [4, 5], [6, 7, 1, 2]]
    alone: list[list[Draft]] = []
    for prompt in prompts:
        drafter, text = drafting(prompt), list(prompt)
        alone.append([play(drafter, says, text=text) for _ in range(8)])
    drafter, texts, rows = LookaheadDrafter(SMALL), [list(prompt) for prompt in prompts], [0, 1]
    started(drafter, prompts[:2])
    for number in range(8):
        if number == 3:
            asked = requests([prompts[2]])
            drafter.join(asked, committed(prompts[2]))
            rows.append(2)
        if number == 5:
            drafter.keep(torch.tensor([2, 0]))
            rows = [2, 0]
        draft = drafter.propose([5] * len(rows))
        all_tokens, all_drawn = [], []
        for row, tokens, parents in zip(rows, draft.tokens.tolist(), draft.parents.tolist(), strict=True):
            expected = alone[row][number - 3 * (row == 2)]
            size = expected.tokens.shape[1]
            assert tokens[:size] == expected.tokens[0].tolist() and set(tokens[size:]) <= {ABSENT}
            assert parents[:size] == expected.parents[0].tolist()
            drawn = drawn_by(says, texts[row], tokens, parents)
            path = accepted_path(tokens, parents, drawn)
            all_tokens.append([*(tokens[node] for node in path), drawn[path[-1] + 1 if path else 0]])
            all_drawn.append(drawn)
            texts[row] += all_tokens[-1]
        drafter.commit(Committed(tokens=all_tokens, drawn=all_drawn))
    assert asked[0].tokens == prompts[2], "a prompt is not the drafter's"


def test_the_pool_keeps_the_latest_of_each_first_token() -> None:
    """Guards the guesses against an n-gram that is there twice, and old ones against which new ones lose."""
    chooser, pool, added = random.Random(0), Pool(3), list[list[int]]()
    for _ in range(300):
        added.append([chooser.randrange(3) for _ in range(3)])
        pool.add(added[-1])
        for first in range(4):
            of_first = [tuple(ngram[1:]) for ngram in reversed(added) if ngram[0] == first]
            assert pool.after(first) == list(dict.fromkeys(of_first))[:3]


def test_ngrams_of_the_text_are_guessed_if_that_is_wanted() -> None:
    """Guards n-grams that span two rounds, or prompt and answer, and those of a text shorter than N."""
    prompt = [1, 2, 3, 9, 1]
    for wanted, expected in ((True, [(2, 3, 9)]), (False, [])):
        drafter = drafting(prompt, Config(ngram=4, window=1, guesses=5, text_ngrams=wanted))
        (row,) = drafter._rows
        assert row.pool.after(1) == expected
        drafter.commit(committed([5, 6]))
        drafter.commit(committed([7]))
        assert row.pool.after(1) == ([(5, 6, 7), (2, 3, 9)] if wanted else [])
        assert row.pool.after(9) == ([(1, 5, 6)] if wanted else [])
    drafter = drafting([1, 2], Config(ngram=4, text_ngrams=True))
    drafter.commit(committed([3, 4]))
    assert drafter._rows[0].pool.after(1) == [(2, 3, 4)]


def test_columns_begin_all_over_the_text() -> None:
    """Guards windows that begin in one place, whose columns would say the same; and a prompt of one token."""
    text = list(range(100))
    starts = [new_column(text, position, 4)[0] for position in range(100, 150)]
    assert len(set(starts)) == 50 and max(b - a for a, b in zip(sorted(starts), sorted(starts)[1:], strict=False)) <= 5
    assert all(new_column(text, position, 4)[1] == (start + 1) % 100 for position, start in enumerate(starts, 100))
    assert new_column([7], 1, 3) == [7, 7, 7]


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"ngram": 1}, "ngram=1: use 2 to 32"),
        ({"ngram": 33}, "ngram=33: use 2 to 32"),
        ({"window": 0}, "window=0: use 1 to 128"),
        ({"window": 129}, "window=129: use 1 to 128"),
        ({"guesses": 0}, "guesses=0: use 1 to 128"),
        ({"guesses": 129}, "guesses=129: use 1 to 128"),
    ],
)
def test_settings_are_checked(setting: dict[str, int], complaint: str) -> None:
    """Guards against a window that never completes an n-gram, and against passes that no model can make."""
    with pytest.raises(ValueError, match=f"^{complaint}$"):
        Config(**setting)
    Config(ngram=2, window=1, guesses=1)
    Config(ngram=32, window=128, guesses=128)
