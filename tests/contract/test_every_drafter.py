"""What every drafter must do. The files in `drafters/` are found, not named: a new one is tested by itself."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from paradraft.core import Draft, Request
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.drafters import branches, drafter_class, takes_draft
from paradraft.drafters.parts.pending_states import PendingStates
from paradraft.drafters.parts.pending_tokens import PendingTokens
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.ragged import from_lists, to_lists
from paradraft.sampling_params import LogitsProcessor, Sampling
from paradraft.tree import ABSENT, Tree
from tests.conftest import VOCAB
from tests.support.decoding import Varying, committed, requests
from tests.support.decoding import answers as answers_of
from tests.support.decoding import decoded as rounds
from tests.support.decoding import texts as texts_of
from tests.support.drafts import DRAFTERS, draft_of
from tests.support.quick import mostly_slow
from tests.support.replays import replay_everything

REPLAYED = "replayed, float64"
RUNTIMES = {
    "eager, float64": Runtime(dtype="float64", compiled=False),
    "compiled, float32": Runtime(dtype="float32", compiled=True),
    "compiled, bfloat16": Runtime(dtype="bfloat16", compiled=True),
    REPLAYED: Runtime(dtype="float64", compiled=True),
}
"""Where equality is exact; compiled passes on a CPU are those in C++, and replayed ones stand for those of a GPU."""
LENGTHS = [1, 2, 5, 8]
QUICK = [("compiled, float32", 2), ("compiled, float32", 8), ("compiled, bfloat16", 1)]
"""The lengths of drafts that `make test` tries."""
PROMPTS = ["a", "helloworld", "abcabcabcabcabc", "The0quick1brown2fox"]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.3, top_k=12, seed=2),
    Sampling(temperature=1.0, top_p=0.8, seed=-3),
]


current = RUNTIMES["eager, float64"]


@pytest.fixture(params=mostly_slow(RUNTIMES, quick=["eager, float64", "compiled, float32"]), autouse=True)
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Runs every test of this file in each of them; of those that name no other, `make test` runs two."""
    monkeypatch.setattr("tests.contract.test_every_drafter.current", RUNTIMES[request.param])
    if request.param == REPLAYED:
        replay_everything(monkeypatch)
    return current


def engine(family: Path, name: str, *, k: int = 4, tree: int | None = None, **changed: int) -> Engine:
    runtime = dataclasses.replace(current, **changed)
    draft = draft_of(family, name)
    chains = load(str(family / "target"), drafter=name, draft=draft, k=k, runtime=runtime, lengths="fixed")
    if tree is None or not branches(name):
        return chains
    return Engine(chains.target, chains.drafter, Speculation(k=k, tree=Tree(budget=tree), lengths="fixed"))


Answers = dict[tuple[str, Sampling], list[int]]


@functools.cache
def answers(family: Path, runtime: Runtime) -> Answers:
    """What plain decoding says to each prompt with each setting."""
    assert current == runtime
    plain = engine(family, "none")
    return {
        (prompt, sampling): plain.generate(prompt, max_new_tokens=40, sampling=sampling).tokens
        for prompt in PROMPTS
        for sampling in SAMPLINGS
    }


@pytest.fixture
def plain_answers(family: Path, runtime: Runtime) -> Answers:
    return answers(family, runtime)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize(
    ("runtime", "k"),
    mostly_slow(itertools.product(RUNTIMES, LENGTHS), quick=QUICK),
    indirect=["runtime"],
)
def test_text_equals_plain_decoding(family: Path, plain_answers: Answers, name: str, k: int) -> None:
    """Guards the promise of the library: a drafter changes the speed, never a token."""
    drafted = engine(family, name, k=k)
    for (prompt, sampling), expected in plain_answers.items():
        assert drafted.generate(prompt, max_new_tokens=40, sampling=sampling).tokens == expected


def test_greedy_equals_transformers(family: Path, runtime: Runtime) -> None:
    """Guards against a mistake that all our own paths share: wrong positions or masks."""
    if runtime.dtype == "bfloat16":
        return  # in which `transformers` rounds after every operation
    ours = engine(family, "none")
    for prompt in PROMPTS:
        tokens = torch.tensor([ours.target.tokenizer(prompt)["input_ids"]])
        theirs = ours.target.lm.model.generate(
            tokens, max_new_tokens=40, do_sample=False, pad_token_id=0, suppress_tokens=list(range(VOCAB, VOCAB + 8))
        )
        assert ours.generate(prompt, max_new_tokens=40).tokens == theirs[0, tokens.shape[1] :].tolist()


@pytest.mark.parametrize("name", [name for name in DRAFTERS if not drafter_class(name).traits.depends_on_rounds])
@pytest.mark.parametrize("varying", [False, True])
def test_state_is_a_function_of_the_committed_tokens(family: Path, name: str, varying: bool) -> None:
    """Guards against a draft that depends on how the rounds before were cut, on those in which a row drafted nothing,
    or on what other rows draft: the same committed tokens, reached by rounds or given as a prompt, must lead to the
    same draft."""
    drafted, again = engine(family, name), engine(family, name)
    texts = [drafted.target.tokenizer(prompt)["input_ids"] for prompt in ("abcabcabcabcabc", "hello", "The0quick")]
    lengths = Varying(4) if varying else Fixed(4)
    batch, generations = drafted.new_batch(lengths=lengths), list(map(Generation, requests(texts, limits=60)))
    batch.join(generations)
    while min(len(generation.tokens) for generation in generations) < 10:
        batch.step()
    anew = again.new_batch()
    anew.join([Generation(generation.so_far) for generation in generations])
    expected = again.drafter.propose([4, 4, 4]).tokens
    tokens = drafted.drafter.propose([4, 0, 2]).tokens
    for row, length in [(0, 4), (2, 2)]:
        assert tokens[row, :length].tolist() == expected[row, : min(length, tokens.shape[1])].tolist()
    # What a row did not want, it wants in the next round.
    hidden = {layer: torch.randn(3, 1, 32) for layer in drafted.drafter.hidden_layers}
    new = dataclasses.replace(committed(*[[token] for token in (7, 8, 9)]), hidden=hidden)
    batch.drafter.commit(new)
    again.drafter.commit(new)
    assert torch.equal(drafted.drafter.propose([4, 4, 4]).tokens, again.drafter.propose([4, 4, 4]).tokens)


@pytest.mark.parametrize("name", [name for name in DRAFTERS if takes_draft(name)])
def test_prompts_are_read_in_pieces_as_at_once(family: Path, name: str) -> None:
    """Guards streams that wait while a draft model reads a long prompt: what it reads before it drafts, in pieces of
    any size and in some rows alone, changes no draft."""
    texts, chooser, drafts, calls = [[5, 6, 7], [9, 8, 7] * 25, [1, 2, 1, 3] * 10], random.Random(3), [], 0
    for in_pieces in (False, True):
        drafted = engine(family, name, width=12)
        batch = drafted.new_batch()
        batch.join(list(map(Generation, requests(texts, limits=40))))
        while in_pieces and drafted.drafter.catch_up([1, 2], chooser.choice([3, 5, 11])):
            calls += 1
        drafts.append(drafted.drafter.propose([4, 4, 4]).tokens.tolist())
    assert drafts[0] == drafts[1]
    reader = getattr(drafted.drafter, "part", drafted.drafter)
    reads_texts = isinstance(getattr(reader, "_states", None), PendingTokens | PendingStates)
    assert calls > 8 if reads_texts else not calls


@pytest.mark.parametrize("name", [name for name in DRAFTERS if drafter_class(name).traits.can_run_ahead])
def test_a_draft_after_a_draft_is_that_after_its_tokens(family: Path, name: str, runtime: Runtime) -> None:
    """Guards drafts that are made ahead (PEARL): they are those of a drafter that has read the tokens as text, with
    settings that read the text too; and drafting ahead leaves no trace, whether the draft before was right or not."""
    ahead, later = engine(family, name), engine(family, name)
    samplings = [Sampling(), Sampling(temperature=0.8, seed=2), Sampling(temperature=0.7, repetition_penalty=1.4)]
    asked = requests([[5, 6, 7], [9] * 70, [1, 2, 1, 2]], samplings, 50)
    right = answers_of(engine(family, "none").new_batch(), asked)
    batch, generations = ahead.new_batch(), list(map(Generation, asked))
    batch.join(generations)
    for number in range(4):
        known = [len(generation.tokens) for generation in generations]
        draft = Draft.chain(from_lists([right[0][known[0] :][:3], [4] * (number % 2), right[2][known[2] :][:2]]))
        found = ahead.drafter.propose([4, 4, 2], draft).tokens
        read = [
            dataclasses.replace(one, tokens=[*one.tokens, *row], answered=one.answered + len(row))
            for one, row in zip([each.so_far for each in generations], to_lists(draft.tokens), strict=True)
        ]
        anew = later.new_batch()
        anew.join(list(map(Generation, read)))
        expected = later.drafter.propose([4, 4, 2]).tokens
        assert [row[:length] for row, length in zip(found.tolist(), [4, 4, 2], strict=True)] == [
            row[:length] for row, length in zip(expected.tolist(), [4, 4, 2], strict=True)
        ]
        out = batch.target.forward(draft)
        verdict = batch.verify(draft, out, batch.sampler)
        new = batch.target.commit(verdict, out)
        batch.drafter.commit(new)
        batch.sampler.commit(new)
        batch.emit(draft, verdict)


class Repeated(Fixed):
    """Asks in each round for the lengths of a script, whatever the order of the rows, and notes what comes.

    Args:
        script: for each round a length for each request.
    """

    def __init__(self, script: list[list[int]]) -> None:
        super().__init__(max(map(max, script)))
        self._script = iter(script)
        self.drafts: list[dict[int, list[tuple[int, int]]]] = []
        """For each round the tokens and parents of the nodes of each request."""

    def start(self, tree: Tree | None, *, is_ragged: bool) -> None:
        self._requests: list[int] = []

    def join(self, requests: Sequence[Request]) -> None:
        self._requests += [request.id for request in requests]

    def keep(self, rows: torch.Tensor) -> None:
        self._requests = [self._requests[row] for row in rows.tolist()]

    def next(self) -> list[int]:
        lengths = next(self._script)
        return [lengths[request] for request in self._requests]

    def cut(self, draft: Draft) -> Draft:
        rows = zip(self._requests, draft.tokens.tolist(), draft.parents.tolist(), strict=True)
        pairs = {request: list(zip(tokens, parents, strict=True)) for request, tokens, parents in rows}
        self.drafts.append({request: [node for node in nodes if node[0] != ABSENT] for request, nodes in pairs.items()})
        return draft


@pytest.mark.parametrize("name", [name for name in DRAFTERS if drafter_class(name).traits.depends_on_rounds])
@pytest.mark.parametrize("varying", [False, True])
def test_state_is_a_function_of_the_rounds(family: Path, name: str, varying: bool) -> None:
    """Guards drafters that learn from the target's draws, and so from the rounds too, against learning from anything
    else: a request that has the same rounds again must have the same draft in each of them, node for node, in another
    row and beside a row that leaves. The texts are those of plain decoding."""
    drafted, chooser = engine(family, name), random.Random(4)
    texts = [drafted.target.tokenizer(prompt)["input_ids"] for prompt in ("abcabcabcabcabc", "hello", "The0quick", "x")]
    asked = requests(texts, [Sampling(), Sampling(temperature=0.7, seed=1), Sampling(), Sampling()], 110)
    k = drafted.speculation.k
    script = [[chooser.choice([0, 2, k]) if varying else k for _ in asked] for _ in range(16)]
    found = []
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        lengths = Repeated(script)
        batch, generations = drafted.new_batch(lengths=lengths), list(map(Generation, asked))
        batch.join([generations[request] for request in order])
        for number in range(len(script)):
            if number == 3:
                batch.leave([generations[3]])
            batch.step()
        found.append((lengths.drafts, [generation.tokens for generation in generations]))
    assert found[0] == found[1]
    plain = engine(family, "none")
    for request, tokens in list(zip(asked, found[0][1], strict=True))[:3]:
        answer = plain.generate([request.tokens], max_new_tokens=110, sampling=request.sampling)
        assert tokens == answer[0].tokens[: len(tokens)]
    kinds = [{str(drafts[request]) for drafts in found[0][0]} for request in range(3)]
    assert max(map(len, kinds)) > 3, "drafts change from round to round"


@pytest.mark.parametrize("runtime", mostly_slow(RUNTIMES, quick=["compiled, bfloat16"]), indirect=True)
@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_without_a_draft_lose_nothing(family: Path, name: str) -> None:
    """Guards against drafters that forget to read the tokens of rounds with K = 0."""

    class Alternating(Fixed):
        calls = 0

        def next(self) -> list[int]:
            self.calls += 1
            return super().next() if self.calls % 9 == 0 else [0] * self._rows

    plain, drafted = engine(family, "none"), engine(family, name, width=8)
    expected = plain.generate("helloworld", max_new_tokens=60).tokens
    tokens = drafted.target.tokenizer("helloworld")["input_ids"]
    batch = drafted.new_batch(lengths=Alternating(5))
    assert answers_of(batch, requests([tokens], limits=60, eos_ids=frozenset([0]))) == [expected]


@pytest.mark.parametrize("runtime", mostly_slow(RUNTIMES, quick=["compiled, bfloat16"]), indirect=True)
@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("tree", [None, 9])
def test_ragged_batch_equals_single_rows(family: Path, name: str, tree: int | None) -> None:
    """Guards batches: rows with prompts, settings, seeds and limits of their own, which end at different times."""
    plain, drafted = engine(family, "none"), engine(family, name, tree=tree)
    limits = [30, 7, 19, 1]
    alone = [
        plain.generate(prompt, max_new_tokens=limit, sampling=sampling).tokens
        for prompt, limit, sampling in zip(PROMPTS, limits, SAMPLINGS, strict=True)
    ]
    together = drafted.generate(PROMPTS, max_new_tokens=limits, sampling=SAMPLINGS)
    assert [result.tokens for result in together] == alone


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("tree", [None, 9])
def test_rows_draft_as_much_as_each_is_asked_for(family: Path, name: str, tree: int | None) -> None:
    """Guards rows that draft nothing beside others that do, in passes too narrow for all that a row has not read: every
    text is the target's, and no row drafts more than it was asked for."""
    plain, drafted = engine(family, "none"), engine(family, name, tree=tree, width=10)
    expected = [plain.generate(prompt, max_new_tokens=40).tokens for prompt in PROMPTS]
    texts = [drafted.target.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    asked: list[list[int]] = []

    class Noted(Varying):
        def next(self) -> list[int]:
            asked.append(super().next())
            return asked[-1]

    batch = drafted.new_batch(lengths=Noted(4), keeps_finished=True)
    steps = rounds(batch, requests(texts, limits=40, eos_ids=drafted.target.eos_ids))
    assert [tokens for _, tokens in sorted(texts_of(steps).items())] == expected
    for step, lengths in zip(steps, asked, strict=True):
        assert all(drafted <= length for drafted, length in zip(step.drafted, lengths, strict=True))


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("tree", [None, 9])
def test_processors_see_texts_that_decoding_reaches(family: Path, name: str, tree: int | None) -> None:
    """Guards processors that follow a grammar or a plan: none is asked what follows an end token or the last token,
    whatever is drafted there, and in rows that have ended while others go on."""
    drafted = engine(family, name, tree=tree)
    prompts, limits = ["ab", "abab", "ababab", "babab"], [3, 12, 20, 7]
    asked: list[list[list[int]]] = [[] for _ in prompts]

    def watching(row: int) -> LogitsProcessor:
        def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            asked[row].extend(ids.tolist())
            few = torch.full_like(scores, -torch.inf)
            few[:, [0, 1, 2, 3]] = scores[:, [0, 1, 2, 3]]
            return few

        return processor

    for seed in range(4):
        samplings = [Sampling(temperature=1.0, seed=seed, processors=[watching(row)]) for row in range(4)]
        drafted.generate(prompts, max_new_tokens=limits, sampling=samplings)
    for prompt, limit, texts in zip(prompts, limits, asked, strict=True):
        assert texts and not [text for text in texts if 0 in text]
        assert max(map(len, texts)) < len(prompt) + limit


class Spelled:
    """A grammar of one text, in which the tokens 1 to 9 take turns."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        (wanted,) = self.forced(ids[0, self.prompt :].tolist(), 1)
        return scores.masked_fill(torch.arange(scores.shape[1]) != wanted, -torch.inf)

    def forced(self, answer: list[int], most: int, /) -> list[int]:
        return [1 + (len(answer) + number) % 9 for number in range(most)]


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "none"])
def test_something_is_accepted(family: Path, name: str) -> None:
    """Guards all other tests of this file: a drafter whose guesses are never accepted passes them without being
    tested, and makes no answer faster. A drafter of forced tokens is asked with a grammar."""
    drafted = engine(family, name)
    needs_grammar = drafter_class(name).traits.needs_grammar
    sampling = Sampling(processors=[Spelled(prompt=15)] if needs_grammar else [])
    stats = drafted.generate("abcabcabcabcabc", max_new_tokens=60, sampling=sampling).stats
    assert sum(stats.accepted) > 0
    assert stats.rounds < stats.tokens


@pytest.mark.parametrize("name", DRAFTERS)
def test_settings_are_checked_before_any_work(family: Path, name: str) -> None:
    """Guards against mistakes that are found when half of the work is done."""
    drafted = engine(family, name)
    passes = []
    drafted.target.lm._pass = lambda *args: passes.append(args)
    for settings, named in [
        ({"max_new_tokens": [5, 5]}, "2 values for 4 prompts"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"max_new_tokens": [5, 5, 5, 500]}, "prompt 4"),
        ({"sampling": [Sampling()] * 3}, "3 values for 4 prompts"),
        ({"sampling": Sampling(logit_bias={VOCAB: 1.0})}, "64 is not among the 64"),
        ({"sampling": Sampling(logit_bias=dict.fromkeys(range(VOCAB), float("-inf")))}, "leave at least two"),
        ({"stop": ["x", ""]}, "stop string is empty"),
        ({"batch_size": 0}, "batch_size=0"),
    ]:
        with pytest.raises(ValueError, match=named):
            drafted.generate(PROMPTS, **{"max_new_tokens": 4, **settings})
    with pytest.raises(ValueError, match="prompt 2 is empty"):
        drafted.generate(["a", "", "b"], max_new_tokens=4)
    for tree, named in [
        (Tree(paths=((0,), (1,), (1, 0))), "leave the tree out|best tokens only"),
        (Tree(budget=64), "leave the tree out|room for 63"),
        (Tree(paths=((0,), (0, 0), (0, 0, 0))), "leave the tree out|k=2"),
    ]:
        if tree.paths is None or drafted.drafter.traits.branching != "tree" or tree.depth == 3:
            with pytest.raises(ValueError, match=named):
                Engine(drafted.target, drafted.drafter, Speculation(k=2, tree=tree, lengths="fixed"))
    assert not passes


@pytest.mark.parametrize("name", DRAFTERS)
def test_streams_go_on_after_other_answers(family: Path, name: str) -> None:
    """Guards streams that are read slowly: other answers use the same caches in between, and no text may change. The
    penalty on what the answer contains shows whether the answer is still told from the prompt."""
    drafted = engine(family, name)
    sampling = Sampling(temperature=0.9, presence_penalty=1.5, seed=3)
    expected = [drafted.generate([prompt], max_new_tokens=24, sampling=sampling)[0].tokens for prompt in PROMPTS]
    streams = [drafted.stream(prompt, max_new_tokens=24, sampling=sampling) for prompt in PROMPTS]
    found: list[list[int]] = [[] for _ in streams]
    left = list(range(len(streams)))
    while left:
        for number in list(left):
            chunk = next(streams[number], None)
            if chunk is None:
                left.remove(number)
            else:
                found[number] += chunk.tokens
        drafted.generate("xyz", max_new_tokens=3)
    assert found == expected


@pytest.mark.parametrize("name", ["pard", "ngram"])
def test_one_engine_serves_many_threads(family: Path, name: str) -> None:
    """Guards servers: two threads in one cache made wrong texts, and in C++ a segmentation fault."""
    drafted = engine(family, name)
    samplings = [Sampling(temperature=0.9, seed=seed) for seed in range(4)]
    cases = list(itertools.product(PROMPTS, samplings))

    def tokens(case: tuple[str, Sampling], *, is_streamed: bool) -> list[int]:
        if is_streamed:
            return [
                token
                for chunk in drafted.stream(case[0], max_new_tokens=12, sampling=case[1])
                for token in chunk.tokens
            ]
        return drafted.generate([case[0]], max_new_tokens=12, sampling=case[1])[0].tokens

    expected = [tokens(case, is_streamed=False) for case in cases]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: tokens(cases[n], is_streamed=n % 2 == 0), range(len(cases))))
    assert found == expected
