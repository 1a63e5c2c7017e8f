"""Drafters joined by `+`: their drafts are one tree, and each part follows the rows as if it were alone."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paradraft import Tree
from paradraft.bench.labels import labels
from paradraft.bench.spec import Method
from paradraft.bench.synthetic import SyntheticAcceptance
from paradraft.cli import main
from paradraft.core import CHAINS, Draft, Drafter, Drafting
from paradraft.decode.batch import Batch
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Confidence
from paradraft.drafters import (
    check_draft,
    drafter_class,
    drafter_config,
    drafter_settings,
    is_drafter,
    load_drafter,
    split_settings,
    takes_draft,
    traits_of,
)
from paradraft.drafters.lookahead import Config, LookaheadDrafter
from paradraft.drafters.ngram import Config as NgramConfig
from paradraft.drafters.ngram import NgramDrafter
from paradraft.drafters.pard import PardDrafter
from paradraft.drafters.parts import calibration, composite
from paradraft.drafters.parts.composite import Composite
from paradraft.drafters.recycle import Config as RecycleConfig
from paradraft.drafters.recycle import RecycleDrafter
from paradraft.drafters.suffix import Config as SuffixConfig
from paradraft.drafters.suffix import SuffixDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.likeliest import Likeliest
from paradraft.models.runtime import Runtime
from paradraft.ragged import from_lists, to_lists
from paradraft.sampling_params import Sampling
from paradraft.traits import Traits
from paradraft.tree import ABSENT
from paradraft.worth import Worth
from tests.support.decoding import answers, committed, requests, started

RUNTIME = Runtime(dtype="float64", compiled=False)
PARTS = ("ngram", "pard", "autoregressive")
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [1, 2, 3, 1, 2], [9, 9, 9], [4, 3, 4, 3, 4]]


@pytest.fixture(scope="module")
def plain(family: Path) -> Engine:
    return load(str(family / "target"), runtime=RUNTIME)


def parts_of(family: Path, plain: Engine, names: Sequence[str] = PARTS) -> list[Drafter]:
    draft = {name: str(family / "pard") if takes_draft(name) else None for name in names}
    return [load_drafter(name, plain.target, draft=draft[name], runtime=RUNTIME) for name in names]


class Watched(Composite):
    """Keeps the last draft."""

    last: Draft

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        self.last = super().propose(lengths, after)
        return self.last


def joined(family: Path, plain: Engine, **settings: object) -> Engine:
    """An engine of three parts, two of which have a draft model."""
    speculation = Speculation(**{"k": 4, "lengths": "fixed"} | settings)
    return Engine(plain.target, Watched(parts_of(family, plain)), speculation)


def check_round(batch: Batch, fresh: Sequence[Drafter]) -> int:
    """Runs a round, in which parts must draft what `fresh` parts draft after the same texts as prompts, or less.

    Returns:
        Tokens that drawing parts have drafted.
    """
    asked, watched, drawn = [generation.so_far for generation in batch.generations], batch.drafter, 0
    expected = []
    for part in fresh:
        part.start(dataclasses.replace(batch.drafting, tree=None), torch.device("cpu"))
        part.join(asked, committed(*(request.tokens for request in asked)))
        expected.append(to_lists(part.propose([4] * len(asked)).tokens))
    batch.step()
    assert isinstance(watched, Watched)
    union = paths_of(watched.last)
    for part, rows in zip(watched.parts, expected, strict=True):
        drafted = [[node.token for node in nodes] for nodes in watched._nodes[part]]
        for row, (found, anew) in enumerate(zip(drafted, rows, strict=True)):
            assert found == (anew if part.traits.estimates else anew[: len(found)])
            assert all(tuple(found[: depth + 1]) in union[row] for depth in range(len(found)))
            drawn += len(found) * (not part.traits.estimates)
    return drawn


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_parts_follow_rows_that_come_and_go(family: Path, plain: Engine, temperature: float) -> None:
    """Guards speed, which no text shows: a part that was not committed to, or whose rows were not moved, drafts
    something else than after the same texts as prompts."""
    engine, fresh = joined(family, plain), parts_of(family, plain)
    batch = engine.new_batch()
    asked = requests(PROMPTS, [Sampling(temperature=temperature, seed=seed) for seed in range(4)], 110)
    generations = list(map(Generation, asked))
    batch.join(generations[:2])
    drawn = 0
    for number in range(12):
        if number == 2:
            batch.join(generations[2:3])
        if number == 5:
            batch.leave(generations[:1])  # so that the last row moves
        if number == 7:
            batch.join(generations[3:])
        drawn += check_round(batch, fresh)
    assert drawn > 60
    for generation, tokens in zip(generations, answers(plain.new_batch(), asked), strict=True):
        assert generation.tokens == tokens[: len(generation.tokens)]


def test_kept_rows_are_those_of_each_part(family: Path, plain: Engine) -> None:
    """Guards conversations: every part with a cache reads a next turn from its end, and drafts as if it had read it
    all."""
    engine, fresh = joined(family, plain), parts_of(family, plain)
    batch, composite = engine.new_batch(kept_rows=2), engine.drafter
    assert isinstance(composite, Composite)
    talks = [list(prompt) * 4 for prompt in PROMPTS[:2]]
    for turn in range(2):
        generations = list(map(Generation, requests(talks, limits=16)))
        batch.join(generations)
        unread = [len(row) for part in composite.parts[1:] for row in part._pending.rows]
        # A part that was left out has not read all of the answer yet.
        assert (max(unread) <= 16 + 2) is (turn == 1)
        check_round(batch, fresh)
        while not batch.is_finished:
            batch.step()
        talks = [[*talk, *generation.tokens, 8, 9] for talk, generation in zip(talks, generations, strict=True)]


def test_a_value_is_the_largest_of_any_part(plain: Engine) -> None:
    """Guards cuts of unions: a node that both parts draft has the larger value, and no child is above its parent."""
    parts = [load_drafter(name, plain.target, draft=None, runtime=RUNTIME) for name in ("ngram", "suffix")]
    union = load_drafter("ngram+suffix", plain.target, draft=None, runtime=RUNTIME)
    asked = requests([*PROMPTS, [1, 2, 3, 4, 5]])
    shared = 0
    for drafter in (*parts, union):
        drafter.start(CHAINS, torch.device("cpu"))
        drafter.join(asked, committed(*(request.tokens for request in asked)))
    of_parts = [paths_of(part.propose([4] * len(asked))) for part in parts]
    for row, of_union in enumerate(paths_of(union.propose([4] * len(asked)))):
        rows = [of_part[row] for of_part in of_parts]
        assert of_union == {
            path: max(own[path] for own in rows if path in own) for path in {path for own in rows for path in own}
        }
        assert all(len(path) == 1 or value <= of_union[path[:-1]] for path, value in of_union.items())
        shared += sum(path in rows[1] and value != rows[1][path] for path, value in rows[0].items())
    assert shared


def paths_of(draft: Draft) -> list[dict[tuple[int, ...], float]]:
    """By row, the values by path."""
    assert draft.values is not None
    rows = []
    for tokens, parents, values in zip(*draft.lists, draft.values, strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens[: len(values)], parents, strict=False):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        rows.append(dict(zip(paths, values, strict=True)))
        assert all(token == ABSENT for token in tokens[len(values) :])
    return rows


class ShortLookahead(LookaheadDrafter):
    """Takes its window for an ordinary tree, so that it can be joined."""

    traits = dataclasses.replace(LookaheadDrafter.traits, branching="tree")

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        self.asked = lengths
        return super().propose(lengths, after)


def target_of(path: tuple[int, ...]) -> int:
    """Stands in for the target: its token after a path of tokens."""
    return random.Random(str(path)).randrange(6)


def paths_in(draft: Draft) -> list[list[tuple[int, ...]]]:
    """By row and node, the tokens from the root to it."""
    rows = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        rows.append(paths)
    return rows


def drawn_after(draft: Draft, read: Draft) -> list[list[int]]:
    """What the target draws after the root and after each node of a draft, if it has read the nodes of another."""
    known = [{path for path in paths if path[-1] != ABSENT} for paths in paths_in(read)]
    return [
        [target_of(()), *(target_of(path) if path in those else ABSENT for path in paths)]
        for paths, those in zip(paths_in(draft), known, strict=True)
    ]


def test_a_part_learns_from_what_was_drawn_after_its_own_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards drafters that learn from the target's draws: the nodes of a union have other numbers than theirs, and the
    last may have been cut off."""
    monkeypatch.setattr(calibration, "AGAIN", 0)  # it is never left out
    config = Config(ngram=3, window=3, guesses=2)
    alone, part = ShortLookahead(config), ShortLookahead(config)
    union = Composite([NgramDrafter(NgramConfig()), part])
    assert union.traits.needs_drawn and union.traits.depends_on_rounds
    texts = [[1, 2, 3, 1, 2, 4, 1, 2], [5, 4, 5, 4]]
    for drafter in (alone, union):
        started(drafter, texts)
    pools, moved = set(), 0
    for number in range(6):
        lengths, tokens = [4, 4 * (number != 2)], committed([number, 1, 2], [4, 5])
        both = union.propose(lengths)
        own = alone.propose(part.asked)
        moved += both.tokens.shape != own.tokens.shape
        is_read = torch.arange(both.tokens.shape[1]) < (6 if number == 3 else 99)
        read = both.where(is_read.expand(both.tokens.shape))
        alone.commit(dataclasses.replace(tokens, drawn=drawn_after(own, read)))
        union.commit(dataclasses.replace(tokens, drawn=drawn_after(read, read)))
        assert [row.columns for row in alone._rows] == [row.columns for row in part._rows]
        assert [row.pool._of_first for row in alone._rows] == [row.pool._of_first for row in part._rows]
        pools.add(str(alone._rows[0].pool._of_first))
    assert len(pools) > 3 and moved


class FewHeads(NgramDrafter):
    """Drafts two tokens at most."""

    max_k = 2

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        assert max(lengths) <= 2
        return super().propose(lengths, after)


def test_a_part_learns_from_the_nodes_of_the_others() -> None:
    """Guards knowledge that the whole pass gives: `recycle` learns what followed a node that `suffix` drafted, and its
    own tree is merged with that of the text within the budget."""
    parts = [SuffixDrafter(SuffixConfig()), RecycleDrafter(RecycleConfig())]
    union = Composite(parts)
    assert union.likeliest == 8 and union.traits.branching == "tree" and union.traits.estimates
    union.start(Drafting(tree=Tree(budget=3)), torch.device("cpu"))
    union.join(requests([[5, 6, 9, 5, 6]]), committed([5, 6, 9, 5, 6]))
    first = union.propose([2])
    assert first.tokens.tolist() == [[9, 5]]
    likeliest = Likeliest(
        read=[[9, 5]],
        parents=[[-1, 0]],
        tokens=[[[2, 3], [4, 1], [6, 1]]],
        logits=[[[9.0, 8.0], [9.0, 0.0], [9.0, 0.0]]],
    )
    union.commit(dataclasses.replace(committed([3, 9]), likeliest=likeliest))
    assert union.propose([1]).tokens.tolist() == [[4, 5]], "after the refused 9 the target said 4; in the text 5 came"
    union.commit(committed([5, 6]))
    draft = union.propose([1])
    assert sorted(draft.tokens[0].tolist()) == [2, 3], "3 followed 9, 5, 6 in the text, and was likely after 5, 6"
    assert union.propose([2]).tokens.shape == (1, 3)


def test_a_part_is_asked_for_no_more_than_it_can_draft(plain: Engine) -> None:
    """Guards drafters with a number of heads, beside others without."""
    few, more = FewHeads(NgramConfig()), NgramDrafter(NgramConfig(max_ngram=1))
    assert Composite([few, more]).max_k is None and Composite([few]).max_k == 2
    engine = Engine(plain.target, Composite([few, more]), Speculation(k=6, lengths="fixed"))
    prompt = [1, 2, 3, 1, 2, 3, 1, 2]
    expected = plain.generate([prompt], max_new_tokens=20)[0].tokens
    assert engine.generate([prompt], max_new_tokens=20)[0].tokens == expected


class Slow(NgramDrafter):
    """Stands in for a draft model: drafts the same tokens in every round, and says how sure it is."""

    traits = Traits(drafts_one_by_one=True)
    asked: list[list[int]]

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        self.asked.append(list(lengths))
        tokens = from_lists([[1, 2, 3, 4][:length] for length in lengths])
        return Draft.chain(tokens, confidence=torch.full(tokens.shape, 0.9))


def test_a_slow_part_is_left_out_where_the_others_expect_as_much() -> None:
    """Guards the time of a draft model: it drafts while its tokens are accepted, no deeper than these are, and rests in
    the rows in which the text repeats itself, until it is tried again. Values are what came true."""
    slow = Slow(NgramConfig())
    slow.asked = []
    union = Composite([slow, SuffixDrafter(SuffixConfig())])
    union.start(Drafting(tree=Tree(budget=8)), torch.device("cpu"))
    texts = [[9, 8, 7], [5, 6] * 20]
    union.join(requests(texts), committed(*texts))
    for number in range(60):
        draft = union.propose([4, 4])
        union.commit(committed([1, 100 + number], [5, 6]))
    first, second = zip(*slow.asked, strict=True)
    assert first[0] == 3 and set(first[20:]) == {2}
    assert [number for number, length in enumerate(second) if length] == [16, 49], "it is tried less and less"
    assert draft.values is not None
    one, two = (paths_of(draft)[0][path] for path in ((1,), (1, 2)))
    assert one > 0.4 and two < 0.6 * one, "1 was always right, 2 never"


class Timed(Slow):
    """A draft takes 0.3 s, and before it 0.02 s for each token that the drafter has not read."""

    now_s, unread, goes_on = 0.0, 0, False

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        if any(lengths):
            self.now_s += 0.3 + 0.02 * self.unread * (not self.goes_on)
            self.unread = 0
        self.goes_on = any(lengths)
        return super().propose(lengths, after)


def timed_union(monkeypatch: pytest.MonkeyPatch) -> tuple[Timed, Composite]:
    slow = Timed(NgramConfig())
    slow.asked = []
    monkeypatch.setattr(composite, "time", SimpleNamespace(perf_counter=lambda: slow.now_s))
    union = Composite([slow, SuffixDrafter(SuffixConfig())])
    union.start(Drafting(tree=Tree(budget=8)), torch.device("cpu"))
    return slow, union


def drafting_rounds(slow: Timed, union: Composite, rounds: int, plain_s: float) -> set[int]:
    """The rounds of one row in which the slow part drafts; each has one accepted token."""
    slow.asked = []
    for number in range(rounds):
        union.worth = Worth(plain_s=plain_s)
        union.propose([4])
        union.commit(committed([1, 100 + number]))
        slow.unread += 2
    return {number for number, (length,) in enumerate(slow.asked) if length}


@pytest.mark.parametrize(("plain_s", "drafting"), [(0.4, set(range(300))), (0.2, {0, 1, 151, 152}), (0.0, None)])
def test_a_part_is_left_out_where_it_is_not_worth_its_time(
    plain_s: float, drafting: set[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards text drafters beside a draft model that does not pay on this CPU: in a draft's time a plain round commits
    0.75 or 1.5 tokens, and the draft has one accepted token. Trials, with what they read, are 2 % of the time."""
    slow, union = timed_union(monkeypatch)
    slow.unread = 3
    union.join(requests([[9, 8, 7]]), committed([9, 8, 7]))
    found = drafting_rounds(slow, union, 300, plain_s)
    assert found == (set(range(300)) if drafting is None else drafting)


@pytest.mark.parametrize(
    ("length", "limit", "read", "waits", "is_drafted"),
    [
        (600, 128, 0, 0, False),  # 12 s for at most 64 rounds, each of which saves 0.1 s
        (600, 10_000, 0, 0, False),  # answers end before such limits
        (600, 128, 580, 0, True),
        (20, 128, 0, 0, True),
        (20, 4, 0, 0, False),
        (20, 40, 0, 0, True),
        (20, 40, 0, 18, False),  # the answer is almost complete
    ],
)
def test_a_long_prompt_is_read_only_if_its_answer_makes_up_for_it(
    length: int, limit: int, read: int, waits: int, is_drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards edits of long texts beside a draft model that reads slowly, and next turns, whose beginning it knows."""
    slow, union = timed_union(monkeypatch)
    slow.unread = 100
    before, prompt = list(range(1000, 1100)), list(range(2000, 2000 + length))
    union.join(requests([before], limits=200), committed(before))
    assert drafting_rounds(slow, union, 50, 0.4) == set(range(50)), "nothing is known of the first text"
    parts, known = union.save(0, 200)
    assert known == [100 + 2 * 49]
    union.keep(torch.tensor([], dtype=torch.long))
    union.join(requests([prompt], limits=limit), committed(prompt))
    union.restore(0, (parts, [read]), length - 10)
    slow.unread = length - read
    for _ in range(waits):
        union.propose([0])
        union.commit(committed([7, 7]))
        slow.unread += 2
    assert bool(drafting_rounds(slow, union, 12, 0.4)) is is_drafted


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [(Tree(budget=2), [1, 2]), (Tree(paths=((0,), (1,), (1, 0))), [1]), (Tree(budget=9), [1, 2, 3])],
)
def test_a_part_that_drafts_alone_keeps_to_the_shape(shape: Tree, tokens: list[int]) -> None:
    """Guards the node budget where the others have nothing to draft: a chain of K tokens may be larger."""
    slow = Slow(NgramConfig())
    slow.asked = []
    union = Composite([slow, SuffixDrafter(SuffixConfig())])
    union.start(Drafting(tree=shape), torch.device("cpu"))
    union.join(requests([[9, 8, 7]]), committed([9, 8, 7]))
    assert union.propose([4]).tokens.tolist() == [tokens]


class Stated(NgramDrafter):
    """Drafts the same tokens in every round; None as confidence for a part that says none."""

    traits = Traits()

    def __init__(self, tokens: Sequence[int], confidence: Sequence[float] | None) -> None:
        super().__init__(NgramConfig())
        self.said = from_lists([list(tokens)]), None if confidence is None else torch.tensor([confidence])

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        return Draft.chain(self.said[0], confidence=self.said[1])


def test_the_surest_part_decides_what_is_cut() -> None:
    """Guards the length policy `confidence`: a token that another part is sure of stays, and so do those of parts that
    do not say how sure they are."""
    for other, kept in ((Stated([5, 8], [0.9, 0.7]), {5, 8}), (Stated([9], None), {9})):
        union = Composite([Stated([5, 6], [0.4, 0.1]), other])
        union.start(Drafting(tree=Tree(budget=8), wants_confidence=True), torch.device("cpu"))
        union.join(requests([[1]]), committed([1]))
        draft = union.propose([2])
        assert set(draft.tokens[0].tolist()) == {5, 6} | kept
        cut = Confidence(2, threshold=0.6).cut(draft)
        assert {token for token in cut.tokens[0].tolist() if token != ABSENT} == kept


@pytest.mark.parametrize("names", ["ngram", "suffix", "recycle", "suffix+recycle", "ngram+suffix"])
@pytest.mark.parametrize("tree", [None, Tree(budget=6)])
def test_what_is_worth_verifying_is_drafted(plain: Engine, names: str, tree: Tree | None) -> None:
    """Guards drafts against a policy's least value: nodes above it are those of the whole draft, none is lost."""
    least, drafts = 0.0, []
    texts = [[1, 5, 2, 1, 6, 3, 1, 5, 2, 1], [5, 6, 7, 5, 6, 7, 5]]
    for least in (0.0, 0.2, 0.4, 1.0):
        drafter = load_drafter(names, plain.target, draft=None, runtime=RUNTIME)
        shape = tree if drafter.traits.branching == "tree" else None
        drafter.worth = Worth(least_value=least)
        drafter.start(Drafting(tree=shape), torch.device("cpu"))
        drafter.join(requests(texts), committed(*texts))
        likeliest = Likeliest(
            read=[[], []],
            parents=[[], []],
            tokens=[[[1, 2]], [[5, 6]]],
            logits=[[[2.0, 1.0]], [[9.0, 1.0]]],
        )
        drafter.commit(dataclasses.replace(committed([1], [5]), likeliest=likeliest))
        drafts.append(paths_of(drafter.propose([4, 4])))
    for row, whole in enumerate(drafts[0]):
        for least, draft in zip((0.2, 0.4, 1.0), drafts[1:], strict=True):
            worth = {path: value for path, value in whole.items() if value >= least}
            assert worth.items() <= draft[row].items()
    sizes = [sum(map(len, draft)) for draft in drafts]
    assert sizes[0] > 0 and (sizes[-1] == 0 or "ngram" in names)


def test_facts_derive_from_the_parts(family: Path, plain: Engine) -> None:
    """Guards against a mask token in an answer, and draft models that are left out of the count of passes."""
    union = Composite(parts_of(family, plain))
    _, pard, autoregressive = union.parts
    assert isinstance(pard, PardDrafter)
    assert union.reserved_tokens == pard.reserved_tokens and union.models == (*pard.models, *autoregressive.models)
    assert union.traits.parts == 3 and not union.traits.can_run_ahead
    assert drafter_class("ngram+pard").traits == Traits(
        label="n-gram + PARD", words="their drafts in one tree", branching="tree", estimates=True,
        depends_on_rounds=True, parts=2, has_drawing_part=True,
    )  # fmt: skip
    assert not drafter_class("ngram+suffix").traits.has_drawing_part
    assert traits_of("ngram+pard").label == "n-gram + PARD" and traits_of("gone+pard") == Traits()
    assert is_drafter("ngram+pard") and not is_drafter("ngram+gone")


def test_a_pass_has_room_for_the_nodes_of_all_parts(family: Path, plain: Engine) -> None:
    """Guards long drafts: two chains of 40 tokens are a tree of up to 80."""
    assert Speculation(drafter="ngram+pard", k=40).nodes == 80
    assert Speculation(drafter="ngram+pard", k=40).pass_width == 82
    wide = load(str(family / "target"), drafter="ngram+pard", draft=str(family / "pard"), k=40, runtime=RUNTIME)
    assert wide.target.lm.width > 80
    with pytest.raises(ValueError, match="a tree of 120 nodes: a pass has room for 63"):
        joined(family, plain, k=40)
    with pytest.raises(ValueError, match="a tree of 1280 nodes: use at most 1024"):
        Speculation(drafter="ngram+pard+eagle+medusa+hydra", k=256)


def test_a_union_is_written_with_plus() -> None:
    """Guards the spelling in all commands: settings go to their part, and a plus in a value stays there."""
    assert split_settings("ngram:max_ngram=4+pard:k=3") == ("ngram+pard", ["ngram_max_ngram=4", "k=3"])
    assert split_settings("ngram+pard:ngram_max_ngram=4") == ("ngram+pard", ["ngram_max_ngram=4"])
    assert split_settings("n-gram + PARD") == ("ngram+pard", [])
    assert split_settings("AR+:batch=4") == ("AR+", ["batch=4"])
    assert split_settings("pard:draft=/a+b/c+d") == ("pard", ["draft=/a+b/c+d"])
    assert split_settings("pard:draft=/a+b+ngram") == ("pard+ngram", ["draft=/a+b"])
    assert drafter_settings("ngram:max_ngram=4+pard") == {"ngram_max_ngram": 4, "draft_window": None}
    configs = drafter_config("ngram:max_ngram=4+pard", "org/model").configs
    assert configs["ngram"].max_ngram == 4 and configs["pard"].draft == "org/model"
    method = Method.parse("ngram:max_ngram=4+pard:k=4:draft=here:verify=typical")
    assert method.name == "ngram+pard" and method.speculation.drafter == "ngram+pard:ngram_max_ngram=4"
    assert (method.speculation.k, method.speculation.draft) == (4, "here")
    assert labels({method.spec: {"method": method.name}})[method.spec].startswith("n-gram + PARD, ngram_max_ngram=4")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter": "ngram+gone"}, "unknown drafter 'gone': use one of"),
        ({"drafter": "ngram+ngram:max_ngram=4"}, "drafter 'ngram.ngram': name each drafter once"),
        ({"drafter": "ngram+ppd"}, "drafter 'ppd' decides the size of its drafts itself, so it cannot be joined by"),
        ({"drafter": "lookahead+pard"}, "drafter 'lookahead' decides the size of its drafts itself, so it cannot be"),
        ({"drafter": "ngram:max_ngram=0+pard"}, "max_ngram=0: use at least 1"),
        (
            {"drafter": "ngram:size=1+pard"},
            "'ngram_size=1' is no setting=value of it; its settings are ngram_max_ngram",
        ),
        ({"drafter": "ngram+pard", "verify": "rejection"}, "do not draw from one distribution.*use verify='match'"),
        (
            {"drafter": "ngram+pard", "gamma": 4},
            "drafter 'ngram\\+pard' cannot draft ahead, use autoregressive or pard",
        ),
        ({"drafter": "eagle_parallel+pard", "draft": "here"}, "eagle_parallel and pard need different draft models"),
    ],
)
def test_what_cannot_be_joined_is_a_mistake(settings: dict[str, object], message: str) -> None:
    """Guards users: one line before anything is loaded, with the fix."""
    with pytest.raises(ValueError, match=message) as refused:
        Speculation(**settings).check_models("pocket")
    assert "\n" not in str(refused.value)


def test_drafters_built_by_hand_are_checked_too(family: Path, plain: Engine) -> None:
    """Guards engines that are given a drafter and not its name."""
    with pytest.raises(ValueError, match="joined by \\+"):
        joined(family, plain, verify="rejection")
    with pytest.raises(ValueError, match="'LookaheadDrafter' decides the size"):
        Composite([LookaheadDrafter(Config())])
    with pytest.raises(ValueError, match="need different draft models"):
        check_draft("medusa+pard", None, "org/target")
    check_draft("eagle_parallel+pard", None, "pocket")
    with pytest.raises(ValueError, match="drafts trees, and synthetic acceptance is for chains"):
        SyntheticAcceptance.parse("0.9,0.8").check("ngram+pard", Speculation(drafter="ngram+pard", k=2))


def test_the_command_line_names_rule_and_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards scripts: exit code 2 and one line."""
    options = ["--target", "pocket", "--drafter", "ngram+pard", "--verify", "rejection", "--prompt", "a"]
    monkeypatch.setattr(sys, "argv", ["paradraft", "generate", *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "verify='rejection'" in line and "use verify='match'" in line
