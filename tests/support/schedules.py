"""Random schedules: requests that join a batch at any round, in any order, beside anything, get what they get alone.

A seed is a schedule: how drafts are made and verified, who joins before which round, who is cancelled or taken up
again, and what each asks for. So a failure names what to run again.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from paradraft.core import Request
from paradraft.decode.batch import Batch, run
from paradraft.decode.generation import AnswerText, Generation, stop_strings
from paradraft.decode.lengths.draft_length import POLICIES, LengthPolicy
from paradraft.drafters import branches, drafter_class
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.tree import Tree
from tests.support.decoding import Rare, Varying
from tests.support.drafts import MOST_K, draft_of

NARROW = {"capacity": 100, "width": MOST_K + 1}
"""Passes that hold one draft, and less than most prompts, or than what rows without drafts leave unread."""
SHAPES: dict[str, Tree | None] = {
    "chain": None,
    "grown": Tree(budget=9),
    "fixed": Tree(paths=((0,), (1,), (0, 0), (0, 1), (0, 0, 0))),
}
LENGTHS: dict[str, Callable[[int], LengthPolicy]] = {**POLICIES, "varying": Varying, "rare": Rare}


def never_twice(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that reads the text: the last token may not be said again."""
    return scores.scatter(1, ids[:, -1:], -torch.inf)


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8),
    Sampling(temperature=0.8, top_k=20),
    Sampling(presence_penalty=1.0),
    Sampling(temperature=0.8, frequency_penalty=0.5, processors=[never_twice]),
    Sampling(processors=[never_twice]),
    Sampling(temperature=1.3, top_p=0.8),
]
STOPS: list[list[str]] = [[], [], ["a", "bc"], ["Z"]]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What one request asks for, and where its answer is looked up."""

    prompt: tuple[int, ...]
    sampling: int
    seed: int
    limit: int
    stop: int


def random_requests(count: int) -> list[Asked]:
    """What is asked for; some prompts begin as others do."""
    chooser, pool = random.Random(count), list[Asked]()
    for index in range(count):
        begin = chooser.choice(pool).prompt if pool and chooser.random() < 0.4 else ()
        more = chooser.choice([1, 2, 5, 14, 30])
        asked = Asked(
            # Few tokens, so that prompt lookup finds something.
            prompt=(begin[: chooser.randint(0, len(begin))] + tuple(chooser.choices(range(1, 6), k=more)))[:40],
            sampling=index % len(SAMPLINGS),
            seed=chooser.randrange(-(2**63), 2**63),
            limit=chooser.choice([1, 2, 3, 6, 12, 20, 40]),
            stop=chooser.randrange(len(STOPS)),
        )
        pool.append(asked)
    return pool


POOL = random_requests(21)
Load = Callable[[str], Engine]
Expected = Callable[[Asked], Generation]


def loader(family: Path, runtime: Runtime) -> Load:
    """Loads each drafter once."""

    @cache
    def engine(name: str) -> Engine:
        draft = draft_of(family, name)
        return load(str(family / "target"), drafter=name, draft=draft, runtime=runtime, lengths="fixed")

    return engine


def generation(engine: Engine, asked: Asked, index: int = 0) -> Generation:
    tokens, sampling = list(asked.prompt), dataclasses.replace(SAMPLINGS[asked.sampling], seed=asked.seed)
    text = AnswerText(engine._detokenizer.after(tokens), stop_strings(STOPS[asked.stop], {})) if asked.stop else None
    eos_ids = frozenset([0]) if asked.sampling % 2 else engine.target.eos_ids | {7}
    return Generation(
        Request(id=index, tokens=tokens, sampling=sampling, max_new_tokens=asked.limit, eos_ids=eos_ids), text
    )


def alone(engine: Engine, asked: Asked) -> Generation:
    """The answer in its own batch."""
    answer = generation(engine, asked)
    for _ in run(engine.new_batch(), [answer]):
        pass
    return answer


def plain_answers(engine: Engine) -> Expected:
    """What plain decoding with an engine's target says to each request alone."""
    plain = Engine(engine.target, NoDrafter(), Speculation(k=1))
    return cache(lambda asked: alone(plain, asked))


def random_speculation(chooser: random.Random, name: str, rule: str | None = None) -> Speculation:
    """Draft length, shape and verification rule that suit a drafter."""
    shape = chooser.choice(list(SHAPES)) if branches(name) else "chain"
    rules = (
        ["match"] if name == "none" or drafter_class(name).traits.depends_on_rounds else ["match", "match", "rejection"]
    )
    k = chooser.randint(3 if shape == "fixed" else 1, MOST_K)
    return Speculation(k=k, tree=SHAPES[shape], verify=rule or chooser.choice(rules), lengths="fixed")


def check(
    seed: int, expected: Expected, engine: Engine, name: str, *, pieces: bool | None = None, rule: str | None = None
) -> int:
    """Fails unless all requests of a schedule get what they get alone; returns how many ended.

    With the match rule that is the text of plain decoding. With the rejection rule and fixed lengths a row has its own
    random numbers and drafts; greedy rows have the tokens of plain decoding.

    Args:
        seed: the schedule.
        expected: the answers of plain decoding.
        engine: has the target and the drafter.
        name: of the drafter.
        pieces: whether prompts are read in pieces while there are other rows; by chance if left out.
        rule: the verification rule; by chance if left out.
    """
    chooser = random.Random(seed)
    drafted = Engine(engine.target, engine.drafter, random_speculation(chooser, name, rule))
    is_match = drafted.speculation.verify == "match"
    lengths = LENGTHS[chooser.choice(list(LENGTHS)) if is_match else "fixed"](drafted.speculation.depth)
    batch = Batch(
        drafted.target,
        drafted.drafter,
        lengths=lengths,
        rule=drafted.speculation.verify,
        tree=drafted.speculation.tree,
        kept_rows=chooser.choice([0, 0, 1, 3]),
    )
    in_pieces = chooser.random() < 0.5 if pieces is None else pieces
    ended = 0
    for asked, answer in scheduled(chooser, drafted, batch, pieces=in_pieces, goes_on=is_match):
        plain = expected(asked)
        own = plain if is_match else alone(drafted, asked)
        assert answer.error is None
        assert answer.tokens == own.tokens[: len(answer.tokens)]
        if SAMPLINGS[asked.sampling].is_greedy:
            assert answer.tokens == plain.tokens[: len(answer.tokens)]
        if answer.is_finished:
            assert (answer.tokens, answer.finish_reason) == (own.tokens, own.finish_reason)
            assert "".join(answer.pieces) == "".join(own.pieces)
            ended += 1
    return ended


def scheduled(
    chooser: random.Random, engine: Engine, batch: Batch, *, pieces: bool, goes_on: bool
) -> list[tuple[Asked, Generation]]:
    """Runs a schedule; returns the answers to its requests, whole, or, where they were cancelled, as far as they went.

    Rows join by chance before rounds, one or several; some are cancelled; some are taken out and join again later with
    the tokens that they have, if it `goes_on`; and once all are, as when another has failed.
    """
    answers: list[tuple[Asked, Generation]] = []
    kinds = chooser.choice([range(len(SAMPLINGS)), range(len(SAMPLINGS)), [0], [1]])  # plain settings have fast ways
    pool = [asked for asked in POOL if asked.sampling in kinds]
    left, paused = chooser.randint(3, 6), list[Generation]()
    resets = chooser.randint(3, 20)
    rounds = 0

    def again(gone: list[Generation]) -> list[Generation]:
        return [each for each in gone if goes_on or not each.tokens]

    while left or paused or batch.generations:
        joining = []
        if batch.prefill.chunked is not None:
            batch.read(chooser.choice([1, 2, 7]))
        while not batch.prefill.chunked and left and chooser.random() < (0.4 if batch.generations else 1.0):
            asked = chooser.choice(pool)
            joining.append(generation(engine, asked, left))
            answers.append((asked, joining[-1]))
            left -= 1
            if chooser.random() < 0.5:
                break
        while not batch.prefill.chunked and paused and (chooser.random() < 0.5 or not (joining or batch.generations)):
            joining.append(paused.pop())
        if joining and pieces and batch.generations:
            batch.begin(joining[0])
            paused += joining[1:]
        elif joining:
            chooser.shuffle(joining)
            batch.join(joining)
        step(batch)
        rounds += 1
        leaving = [each for each in batch.members if not each.is_finished and chooser.random() < 0.08]
        if leaving:
            batch.leave(leaving)
            # Where a pass needs two rows, the last but one stays.
            gone = [each for each in leaving if each not in batch.members]
            paused += [each for each in again(gone) if chooser.random() < 0.6]
        if rounds == resets:
            paused += again([each for each in batch.members if not each.is_finished])
            batch.clear()
    return answers


def step(batch: Batch) -> None:
    """Runs a round, in which every row gets a token, and none drafts more than it is asked for."""
    before = [(row, len(row.tokens)) for row in batch.generations]
    policy, lengths = batch.lengths.next, list[int]()

    def noted() -> list[int]:
        lengths[:] = policy()
        return list(lengths)

    batch.lengths.next = noted  # type: ignore[method-assign]
    output = batch.step()
    batch.lengths.next = policy  # type: ignore[method-assign]
    assert all(row.is_finished or len(row.tokens) > tokens for row, tokens in before), "every round gives a token"
    assert all(drafted <= length for drafted, length in zip(output.drafted, lengths, strict=True))
