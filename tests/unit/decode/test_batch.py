"""What a batch does around a round: how deep to draft, what is emitted, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from paradraft.core import INVALID, Committed, Draft, Drafting, Request, Verdict
from paradraft.decode.batch import LEARNING, Batch, run
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.decode.stats import RoundOutput, RoundTime
from paradraft.drafters.none import NoDrafter
from paradraft.models.causal_lm import CausalLM
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT, Tree
from paradraft.worth import Worth
from tests.conftest import VOCAB, tiny_model
from tests.support.decoding import CPU, requests, target_of


def batch_of(limits: list[int], *, eos: frozenset[int] = frozenset(), k: int = 4, tree: Tree | None = None) -> Batch:
    """A batch whose target is never asked."""
    batch = Batch(SimpleNamespace(device=CPU), NoDrafter(), lengths=Fixed(k), tree=tree)
    batch.generations = list(map(Generation, requests([[1]] * len(limits), limits=limits, eos_ids=eos)))
    batch.lengths.join(requests([[1]] * len(limits)))
    return batch


class Pausing(Fixed):
    worth: Worth


def accepting(*rows: list[int], nodes: int = 4) -> tuple[Draft, Verdict]:
    """A round in which each row's tokens but the last were drafted, `nodes` of them, and accepted."""
    draft = Draft.chain(torch.tensor([row[:-1] + [9] * (nodes + 1 - len(row)) for row in rows]))
    return draft, Verdict(paths=[list(range(len(row) - 1)) for row in rows], tokens=list(rows))


def test_what_a_round_gave_is_told() -> None:
    """Guards statistics and streams: the accepted tokens that were cut off at the end are not counted."""
    batch = batch_of([10], eos=frozenset([7, 8]))
    assert batch.emit(*accepting([1, 7, 2, 3])) == RoundOutput(
        requests=[0], tokens=[[1, 7]], accepted=[2], drafted=[4], nodes=[4], paths=[[0, 1]], finished=[True]
    )
    assert batch.is_finished


def test_rows_end_on_their_own() -> None:
    """Guards against a row that goes on after its end, or one that ends because another has."""
    batch = batch_of([4, 4], eos=frozenset([7]))
    assert batch.emit(*accepting([7, 1], [1, 2])).finished == [True, False]
    assert not batch.is_finished and [generation.room for generation in batch.generations] == [0, 2]
    step = batch.emit(*accepting([1, 2, 3], [3, 7, 1]))
    assert (step.tokens, step.accepted, step.finished) == ([[], [3, 7]], [0, 2], [True, True])


def test_what_follows_an_absent_token_is_not_counted() -> None:
    """Guards statistics of drafts with holes: a pass does not compute such tokens."""
    batch = batch_of([10])
    draft, verdict = accepting([5])
    output = batch.emit(replace(draft, tokens=torch.tensor([[7, ABSENT, 8, 9]])), verdict)
    assert (output.drafted, output.nodes) == ([1], [1])


def test_a_finished_row_counts_no_drafts() -> None:
    """Guards the acceptance rate: what is drafted for a row after its end is not counted, as its tokens are not."""
    batch = batch_of([9, 9], eos=frozenset([7]))
    assert batch.emit(*accepting([7], [1])).drafted == [4, 4]
    step = batch.emit(*accepting([1, 2], [1]))
    assert (step.drafted, step.nodes) == ([0, 4], [0, 4])


def test_absent_nodes_are_not_drafted() -> None:
    """Guards the acceptance rate of drafters whose rows propose different numbers of tokens."""
    draft, verdict = accepting([1, 2], [3])
    tokens = draft.tokens.clone()
    tokens[1, 1:] = ABSENT
    step = batch_of([9, 9]).emit(Draft.chain(tokens), verdict)
    assert (step.drafted, step.nodes) == ([4, 1], [4, 1])


def test_all_nodes_of_a_tree_are_counted_and_its_depth() -> None:
    """Guards the acceptance per position against the side branches, which are no deeper."""
    tree = Draft(tokens=torch.tensor([[1, 2, 3]]), parents=torch.tensor([[-1, -1, 0]]))
    verdict = Verdict.of(tree, [[]], [5])
    step = batch_of([9]).emit(tree, verdict)
    assert (step.drafted, step.nodes) == ([2], [3])


def test_requests_are_named_by_their_ids() -> None:
    """Guards whoever collects the tokens: rows move, ids do not."""
    batch = batch_of([9, 9, 9])
    batch.generations = [batch.generations[2], batch.generations[0]]
    assert batch.emit(*accepting([1], [2])).requests == [2, 0]


def test_damage_belongs_to_one_row() -> None:
    """Guards the other requests of a batch: one whose logits are not numbers fails alone, the target's or the draft
    model's; deeper in a draft a processor may have forbidden every token."""
    batch = batch_of([9] * 4)
    draft, verdict = accepting([1, 2], [INVALID], [3], [4, 5])
    tokens = draft.tokens.clone()
    tokens[2, 0] = tokens[3, 2] = INVALID
    step = batch.emit(Draft.chain(tokens), verdict)
    assert step.tokens == [[1, 2], [], [3], [4, 5]]
    assert step.finished == [False, True, True, False]
    errors = [str(generation.error) for generation in batch.generations]
    assert errors[0] == errors[3] == "None"
    assert "the target's largest logit is NaN" in errors[1] and "the draft model's largest logit is NaN" in errors[2]


def test_token_zero_is_a_token() -> None:
    """Guards against token 0 taken for padding, in a text and in a draft."""
    step = batch_of([9]).emit(*accepting([0, 0, 5]))
    assert (step.tokens, step.drafted, step.nodes) == ([[0, 0, 5]], [4], [4])


@pytest.mark.parametrize(
    ("first", "second", "is_wrong"), [(9, INVALID, False), (INVALID, 9, True), (INVALID, INVALID, True)]
)
def test_a_drafter_whose_logits_are_no_numbers_is_named(first: int, second: int, is_wrong: bool) -> None:
    """Guards against drafts of nothing, round after round. Deeper in a draft a processor may have forbidden all, and
    nobody drafts for a row that has ended."""
    _, verdict = accepting([1], [2], nodes=2)
    draft = Draft.chain(torch.tensor([[9, 9], [first, second]]))
    batch = batch_of([9, 1])
    assert batch.emit(draft, verdict).finished == [False, True]
    one, other = batch.generations
    assert one.error is None and one.tokens == [1]
    assert str(other.error).startswith("the draft model's largest logit" if is_wrong else "None")
    ended = batch_of([9, 1])
    ended.emit(*accepting([1], [2]))
    assert ended.emit(draft, verdict).tokens == [[1], []]
    assert ended.generations[1].error is None


def test_a_draft_is_no_deeper_than_some_row_has_room_for() -> None:
    """Guards draft passes that are thrown away; a grown tree keeps its shape, but for rows of one token."""
    assert [batch_of([3, 5], k=k).draft_lengths() for k in (1, 4, 9)] == [[1, 1], [2, 4], [2, 4]]
    assert batch_of([3, 5], k=9, tree=Tree(paths=((0,),))).draft_lengths() == [2, 4]
    assert batch_of([3, 1], k=9, tree=Tree(budget=7)).draft_lengths() == [9, 0]
    batch = batch_of([3, 5], k=9)
    batch.draft_lengths()
    draft = batch.trim(Draft.chain(torch.arange(18).view(2, 9)))
    assert (draft.tokens != ABSENT).sum(1).tolist() == [2, 4]
    ended = batch_of([1, 5])
    ended.emit(*accepting([6], [6]))
    assert ended.draft_lengths() == [0, 3]
    draft = ended.trim(Draft.chain(torch.arange(18).view(2, 9)))
    assert (draft.tokens != ABSENT).sum(1).tolist() == [0, 3]


def tiny_batch(seed: int = 1, **settings: int) -> Batch:
    lm = CausalLM(tiny_model(seed), vocab_size=VOCAB, compiled=False, **settings)
    return Batch(target_of(lm), NoDrafter(), lengths=Fixed(0))


def test_the_likeliest_tokens_are_not_sought_in_a_pause() -> None:
    """Guards the time of the search; the drafter learns again before the pause ends."""
    batch = batch_of([10])
    batch.drafter.likeliest = 5
    batch.lengths = policy = Pausing(4)
    policy.join(requests([[1]]))
    found = []
    for policy.worth in (Worth(), Worth(pause=200), Worth(pause=LEARNING + 1), Worth(pause=LEARNING), Worth(pause=1)):
        batch.draft_lengths()
        found.append(batch.target.likeliest)
    assert found == [5, 0, 0, 5, 5]


def test_no_two_batches_use_one_target() -> None:
    """Guards against texts from the cache of another batch; the newer one may go on."""
    first = tiny_batch()
    assert first.is_current, "nobody was before it"
    second = Batch(first.target, first.drafter, lengths=Fixed(0))
    first.join(list(map(Generation, requests([[1, 2]], limits=9))))
    assert first.is_current
    first.step()
    second.join(list(map(Generation, requests([[3, 4]], limits=9))))
    assert second.is_current and not first.is_current
    with pytest.raises(ValueError, match=r"^another batch was started on this target: finish one before the next$"):
        first.step()
    second.step()


def test_a_batch_begins_anew_when_it_is_empty() -> None:
    """Guards the statistics of a service, and the cache: what ended leaves nothing behind."""
    batch = tiny_batch()
    assert batch.clock.stats.tokens == 0
    for tokens in ([1, 2], [5, 6, 7]):
        outputs = list(run(batch, list(map(Generation, requests([tokens], limits=3)))))
        assert [output.requests for output in outputs] == [[0]] * 3
        assert batch.generations == [] and batch.is_finished
        assert batch.clock.stats.tokens == 3


def test_what_a_drafter_reserves_is_not_chosen_and_is_given_back() -> None:
    """Guards one target of two drafters: a mask of one of them is an ordinary token beside the other."""
    batch = tiny_batch()
    free = next(run(batch, list(map(Generation, requests([[1, 2]], limits=1))))).tokens[0]
    for reserved, is_chosen in ((tuple(free), False), ((), True)):
        other = Batch(batch.target, NoDrafter(reserved), lengths=Fixed(0))
        found = next(run(other, list(map(Generation, requests([[1, 2]], limits=1))))).tokens[0]
        assert (found == free) == is_chosen


def test_an_error_of_one_request_is_raised() -> None:
    """Guards audits and plans, which use no scheduler: an answer that failed is not taken for a short one."""

    def forbids(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf)

    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    for processor, kind, said in ((forbids, ValueError, "forbids every token"), (fails, KeyError, "mine")):
        batch = tiny_batch()
        samplings = [Sampling(), Sampling(processors=[processor])]
        generations = list(map(Generation, requests([[1, 2], [3, 4]], samplings, 5)))
        with pytest.raises(kind, match=said):
            list(run(batch, generations))


def test_prompts_and_roots_stay_with_their_rows() -> None:
    """Guards rows that join later: the last token of a prompt is read in the round after, and others' roots stay."""
    batch = tiny_batch()
    first, second = map(Generation, requests([[1, 2], [9, 3, 4, 5]], limits=4))
    batch.join([first])
    batch.step()
    batch.join([second])
    assert batch.generations == [first, second]
    assert batch.target._root_B1.tolist() == [[first.tokens[0]], [5]]
    assert batch.target.lm.cache.lengths == [2, 3]


class SeenLengths(Fixed):
    """Remembers what it was told."""

    wants_confidence = True

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        super().start(tree, is_ragged=is_ragged)
        self.started = tree, is_ragged
        self.observed: list[tuple[object, ...]] = []

    def observe(self, output: RoundOutput, time: RoundTime | None) -> None:
        self.observed.append((output, time))


class SeenDrafter(NoDrafter):
    """Remembers what it was told."""

    hidden_layers = (1,)

    def start(self, drafting: Drafting, device: torch.device) -> None:
        super().start(drafting, device)
        self.started = drafting, device

    def join(self, requests: Sequence[Request], prompt: Committed) -> None:
        self.joined = [request.tokens for request in requests], prompt.tokens, list(prompt.hidden)


def test_all_parts_of_a_batch_are_told_what_it_is_for() -> None:
    """Guards against parts that serve different rules or shapes, and against a policy that measures something else: it
    is told the times of the round, and the rest of the one before."""
    lm, tree = CausalLM(tiny_model(1), vocab_size=VOCAB, compiled=False), Tree(budget=3)
    lengths, drafter = SeenLengths(2), SeenDrafter((7,))
    batch = Batch(target_of(lm), drafter, lengths=lengths, rule="rejection", tree=tree)
    batch.join(list(map(Generation, requests([[1, 2], [3]], limits=9))))
    drafting = Drafting(rule="rejection", draws="numbers", tree=tree, wants_confidence=True)
    assert drafter.started == (drafting, CPU)
    assert drafter.joined == ([[1, 2], [3]], [[1, 2], [3]], [1])
    assert lengths.started == (tree, False)
    assert batch.sampler.draws == "numbers"
    assert batch.target._hidden_layers == (1,)
    for number in range(3):
        output = batch.step()
        seconds = batch.clock.last_s
        rest = seconds["other"] if number else 0.0
        time = RoundTime(draft_s=seconds["draft"], verify_s=seconds["verify"], other_s=rest)
        assert lengths.observed[-1] == (output, time)
        assert rest > 0.0 or not number
    batch.begin(list(map(Generation, requests([[1, 2, 3]]))))
    batch.read_along(1)
    output = batch.step()
    assert lengths.observed[-1] == (output, None), "the time of a round that reads a prompt says nothing of drafts"
