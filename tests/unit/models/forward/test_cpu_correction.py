"""Chains and trees drawn in C++ are those that Python draws."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from paradraft.core import Drafting, Request
from paradraft.models.forward.cpu.correction import NativeCorrection
from paradraft.models.forward.cpu.drawing import PassOutputs
from paradraft.sampling.distribution import best_token
from paradraft.sampling.expansion import expanded
from paradraft.sampling.noise import PositionNoise, rows_of
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT, Tree

WIDTH = 10


Paths = dict[tuple[int, ...], None]


def paths_of(tokens: list[int], parents: list[int]) -> Paths:
    """The tokens on the way to each node of a tree, in its order."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        if token != ABSENT:
            paths.append((*(paths[parent] if parent != ABSENT else ()), token))
    return dict.fromkeys(paths)


class Case:
    """Random matrices and logits; of a Markov head, whose memories are rows of its embedding, if so."""

    def __init__(
        self, seed: int, *, rows: int, places: int, vocab: int, rank: int, dtype: torch.dtype, is_markov: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.embedding = numbers(vocab + 3, rank if is_markov else WIDTH)
        self.token, self.memory = (None, None) if is_markov else (numbers(rank, WIDTH), numbers(rank, rank))
        self.correction = numbers(vocab, rank)
        self.logits = 3 * numbers(rows, places, vocab).float()
        self.reads = None if is_markov else numbers(rows, places - 1, rank).float()
        positions = torch.arange(places).repeat(rows, 1) + 7
        self.position_noise = PositionNoise(torch.arange(rows) + 100 * seed, positions, vocab)
        self.noise = self.position_noise.of(None)

    def memory_after(self, row: int, place: int, token: int, before: Tensor | None) -> Tensor:
        """The memory after a token at a place, and with which the next place is corrected."""
        embedded = self.embedding[max(token, 0)].float()
        if self.reads is None or self.token is None or self.memory is None:
            return embedded
        read = self.reads[row, place] + self.token.float() @ embedded
        return silu(read if before is None else read + self.memory.float() @ before)

    def native(self, temperatures: list[float], threads: int = 1) -> Tensor:
        chains = NativeCorrection(self.embedding, self.token, self.memory, self.correction)
        noise = self.position_noise if any(temperatures) else None
        return chains.chains(PassOutputs((), self.logits, self.reads, temperatures, noise, threads))

    def trees(self, temperatures: list[float], budget: int, threads: int = 1) -> list[Paths]:
        """What C++ draws."""
        native = NativeCorrection(self.embedding, self.token, self.memory, self.correction)
        noise = self.position_noise if any(temperatures) else None
        outputs = PassOutputs((), self.logits, self.reads, temperatures, noise, threads)
        tokens, parents = native.trees(outputs, number=budget, budget=budget)
        return [paths_of(*row) for row in zip(tokens.tolist(), parents.tolist(), strict=True)]

    def likeliest(self, temperatures: list[float], budget: int) -> tuple[list[Paths], float]:
        """The likeliest paths of all, looked for depth by depth; and by how much the last of a row was likelier than
        the next, at least."""
        places = self.logits.shape[1]
        found, closest = [], math.inf
        for row, temperature in enumerate(temperatures):
            values: dict[tuple[int, ...], float] = {(): 0.0}
            memories: dict[tuple[int, ...], Tensor | None] = {(): None}
            level: list[tuple[int, ...]] = [()]
            for place in range(places):
                following: list[tuple[int, ...]] = []
                for path in level:
                    logits = self.logits[row, place]
                    if path:
                        memories[path] = memory = self.memory_after(row, place - 1, path[-1], memories[path[:-1]])
                        logits = logits + self.correction.float() @ memory
                    scores = logits.double()
                    if temperature:
                        scores = (logits / temperature).double() + self.noise[row, place]
                    best = scores.log_softmax(0).topk(min(budget + 1, len(scores)))
                    for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                        values[*path, token] = values[path] + value
                        following.append((*path, token))
                level = sorted(following, key=lambda path: -values[path])[:budget]
            order = sorted((path for path in values if path), key=lambda path: -values[path])
            if len(order) > budget and order[budget][:-1] != order[budget - 1]:  # a parent is always before its child
                closest = min(closest, values[order[budget - 1]] - values[order[budget]])
            found.append(dict.fromkeys(order[:budget]))
        return found, closest

    def plain(self, temperatures: list[float]) -> tuple[Tensor, float]:
        """The same token by token; and by how much a score was larger than the next, at least."""
        rows, places, _ = self.logits.shape
        tokens = torch.zeros(rows, places, dtype=torch.long)
        closest = math.inf
        for row, temperature in enumerate(temperatures):
            memory = None
            for place in range(places):
                logits = self.logits[row, place]
                if place:
                    memory = self.memory_after(row, place - 1, int(tokens[row, place - 1]), memory)
                    logits = logits + self.correction.float() @ memory
                scores = logits.double()
                if temperature:
                    scores = (logits / temperature).double() + self.noise[row, place]
                best = scores.nan_to_num(-math.inf).topk(2).values
                closest = min(closest, float((best[0] - best[1]).nan_to_num(math.inf)))
                tokens[row, place] = best_token(scores[None, None])[0, 0]
        return tokens, closest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "places", "vocab", "rank"), [(1, 8, 300, 6), (5, 4, 64, 12), (2, 1, 7, 3), (3, 2, 1000, 130)]
)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("is_markov", [False, True])
def test_tokens_are_those_drawn_one_by_one(
    rows: int, places: int, vocab: int, rank: int, dtype: torch.dtype, threads: int, is_markov: bool
) -> None:
    """Guards memories and embeddings of other tokens, and panels that are missed; a row is the same in any batch."""
    temperatures = [(0.0, 0.8, 1.7)[row % 3] for row in range(rows)]
    for seed in range(5):
        case = Case(seed, rows=rows, places=places, vocab=vocab, rank=rank, dtype=dtype, is_markov=is_markov)
        expected, closest = case.plain(temperatures)
        assert closest > 1e-5  # or rounding would decide
        assert torch.equal(case.native(temperatures, threads), expected)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logits_that_are_no_numbers(number: float, temperature: float) -> None:
    """Guards ids taken from a position whose logits are NaN or infinite, which must be told from tokens; a single
    -inf is an ordinary forbidden token."""
    case = Case(1, rows=2, places=4, vocab=150, rank=5, dtype=torch.float32)
    case.logits[0, 2, 77] = number
    case.logits[1, 1] = -math.inf
    found, (expected, _) = case.native([temperature] * 2), case.plain([temperature] * 2)
    assert torch.equal(found, expected)
    assert found[1, 1] == -2 and (found[0, 2] == -2) == (number != -math.inf)


def test_of_equal_tokens_the_first_is_taken() -> None:
    """Guards ties that threads or panels decide: the target takes the first."""
    case = Case(2, rows=1, places=2, vocab=400, rank=4, dtype=torch.float32)
    case.logits[:] = 0.0
    case.correction[:] = 0.0
    for threads in (1, 2):
        assert case.native([0.0], threads).tolist() == [[0, 0]]
    case.logits[0, :, 130] = case.logits[0, :, 390] = 2.0
    for threads in (1, 2):
        assert case.native([0.0], threads).tolist() == [[130, 130]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "places", "vocab", "rank", "budget"),
    [(1, 8, 300, 6, 12), (5, 4, 64, 12, 7), (2, 1, 7, 3, 3), (3, 3, 1000, 130, 24), (1, 2, 3, 4, 12), (2, 5, 90, 4, 1)],
)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("is_markov", [False, True])
def test_trees_are_the_likeliest_nodes(
    rows: int, places: int, vocab: int, rank: int, budget: int, dtype: torch.dtype, threads: int, is_markov: bool
) -> None:
    """Guards a token thought of after another node than its parent, branches that are missed, and trees deeper than
    the draft."""
    temperatures = [(0.0, 0.8, 1.7)[row % 3] for row in range(rows)]
    seen = 0
    for seed in range(6):
        case = Case(seed, rows=rows, places=places, vocab=vocab, rank=rank, dtype=dtype, is_markov=is_markov)
        expected, closest = case.likeliest(temperatures, budget)
        if closest < 1e-5:  # rounding would decide
            continue
        found = case.trees(temperatures, budget, threads)
        assert [set(paths) for paths in found] == [set(paths) for paths in expected]
        seen += 1
    assert seen > 2


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_trees_of_logits_that_are_no_numbers(number: float, temperature: float) -> None:
    """Guards ids taken from a place whose logits are NaN or infinite, and nodes after it."""
    case = Case(1, rows=3, places=4, vocab=150, rank=5, dtype=torch.float32)
    case.logits[0, 2, 77] = number
    case.logits[1, 0] = -math.inf
    case.logits[2, 0, 3:] = -math.inf
    found = case.trees([temperature] * 3, 9)
    assert list(found[1]) == [(-2,)]
    assert {path[0] for path in found[2]} <= {0, 1, 2} and len(found[2]) == 9
    at_place = {token for path in found[0] for token in path[2:3]}
    assert at_place <= {-2} if number != -math.inf else 77 not in at_place and at_place.isdisjoint({-2})
    assert all(len(path) <= 3 for path in found[0]) or number == -math.inf


@pytest.mark.parametrize("samplings", [[0.0, 0.0], [0.7, 0.0, 1.3]])
def test_trees_are_those_that_python_grows(samplings: list[float]) -> None:
    """Guards noise where trees are grown without it, and temperatures that one of the two leaves out."""
    case = Case(3, rows=len(samplings), places=5, vocab=400, rank=6, dtype=torch.float32)
    asked = [Sampling(temperature=temperature, seed=row) for row, temperature in enumerate(samplings)]
    sampler = Sampler(requests(asked), drafting=Drafting(tree=Tree(budget=9)))
    plain = sampler.plain_draws(5, 400)
    assert plain is not None and (plain[1] is None) == (not any(samplings))
    native = NativeCorrection(case.embedding, case.token, case.memory, case.correction)
    tokens, parents = native.trees(PassOutputs((), case.logits, case.reads, *plain, 1), number=9, budget=9)
    memories: list[Tensor] = []
    assert case.reads is not None and case.token is not None and case.memory is not None
    reads, token, memory = case.reads, case.token, case.memory

    def expand(depth: int, new: Tensor, slot: Tensor) -> Tensor:
        read = reads[:, depth - 1, None] + case.embedding[new] @ token.T
        if memories:
            read = read + memories.pop().gather(1, slot[:, :, None].expand(-1, -1, 6)) @ memory.T
        memories.append(silu(read))
        return case.logits[:, depth, None] + memories[0] @ case.correction.T

    draft = expanded(sampler, Tree(budget=9), case.logits[:, :1], expand, k=5)
    for row in range(len(samplings)):
        expected = set(paths_of(draft.tokens[row].tolist(), draft.parents[row].tolist()))
        assert set(paths_of(tokens[row].tolist(), parents[row].tolist())) == expected and len(expected) == 9


@pytest.mark.parametrize("is_markov", [False, True])
@pytest.mark.parametrize("temperatures", [[0.0, 0.0], [0.7, 0.0]])
def test_of_a_head_with_some_ids_only_these_are_drafted(temperatures: list[float], *, is_markov: bool) -> None:
    """Guards rows that are returned in place of ids, embeddings of rows, and noise of others."""
    case = Case(4, rows=2, places=5, vocab=400, rank=6, dtype=torch.float32, is_markov=is_markov)
    ids = torch.randperm(400, generator=torch.Generator().manual_seed(5))[:70].sort().values
    others = torch.ones(400, dtype=torch.bool).index_fill(0, ids, False)
    some = NativeCorrection(case.embedding, case.token, case.memory, case.correction[ids], ids)
    case.logits[..., others] = math.nan
    noise = case.position_noise if any(temperatures) else None
    outputs = PassOutputs((), case.logits, case.reads, temperatures, noise, 1)
    chains, (tokens, parents) = some.chains(outputs), some.trees(outputs, number=9, budget=9)
    case.logits[..., others] = -math.inf
    assert chains.tolist() == case.native(temperatures).tolist()
    for row, expected in enumerate(case.trees(temperatures, 9)):
        assert paths_of(tokens[row].tolist(), parents[row].tolist()) == expected and len(expected) == 9


SETTINGS = [Sampling(), Sampling(temperature=0.7, seed=3), Sampling(temperature=1.3, seed=9)]
OTHERS = [
    Sampling(temperature=0.7, top_k=5), Sampling(temperature=0.7, top_p=0.9), Sampling(temperature=0.7, min_p=0.1),
    Sampling(repetition_penalty=1.2), Sampling(logit_bias={3: 1.0}), Sampling(presence_penalty=0.5),
]  # fmt: skip


def requests(samplings: list[Sampling]) -> list[Request]:
    return [Request(id=row, tokens=[1] * (row + 1), sampling=sampling) for row, sampling in enumerate(samplings)]


def test_noise_is_that_of_the_sampler() -> None:
    """Guards numbers of other positions or seeds: tokens drawn with `plain_draws` are those of `candidates`."""
    sampler = Sampler(requests(SETTINGS))
    logits = torch.randn(3, 6, 1500, generator=torch.Generator().manual_seed(1))
    plain = sampler.plain_draws(6, 1500)
    assert plain is not None
    temperatures, of_positions = plain
    assert temperatures == [0.0, 0.7, 1.3] and of_positions is not None
    noise, some = of_positions.of(None), torch.tensor([7, 900, 1499])
    rows = rows_of(some.numpy())
    assert torch.equal(of_positions.kept(rows), noise[..., some]) and torch.equal(
        of_positions.kept(rows), noise[..., some]
    )
    assert (of_positions.of(some.expand(3, 6, 3)) - noise[..., some]).abs().max() < 1e-12
    expected = sampler.candidates(logits, 0, 1).tokens[:, :, 0]
    for row, temperature in enumerate(temperatures):
        scores = (logits[row] / temperature).double() + noise[row] if temperature else logits[row]
        assert torch.equal(best_token(scores[None])[0], expected[row])
    greedy = Sampler(requests([Sampling(), Sampling()])).plain_draws(6, 1500)
    assert greedy == ([0.0, 0.0], None)


@pytest.mark.parametrize("sampling", OTHERS)
def test_other_settings_are_not_drawn_in_cpp(sampling: Sampling) -> None:
    """Guards filters and penalties that drafts would leave out, and lose acceptance."""
    assert Sampler(requests([Sampling(), sampling])).plain_draws(4, 100) is None


@pytest.mark.parametrize(
    "drafting",
    [
        Drafting(draws="numbers"),
        Drafting(draws="numbers", tree=Tree(budget=4)),
        Drafting(tree=Tree(paths=((0,), (1,)))),
        Drafting(wants_confidence=True),
    ],
)
def test_other_drafts_are_not_drawn_in_cpp(drafting: Drafting) -> None:
    assert Sampler(requests(SETTINGS), drafting=drafting).plain_draws(4, 100) is None
