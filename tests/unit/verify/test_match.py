"""The match rule against plain drawing, one token after the other, and wrong rules that must be caught."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paradraft.core import Draft, TargetOut, Verdict
from paradraft.models.forward import FINAL_NORM
from paradraft.parents import depths
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT
from paradraft.verify import load_rule, rule_names
from paradraft.verify.match import verify
from tests.support.bonus import with_bonus
from tests.support.decoding import sampler
from tests.support.drawing import draw
from tests.support.judges import with_settings
from tests.support.trees import path_to, random_parents

VOCAB = 6
SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=4), Sampling(temperature=0.8, top_k=4, top_p=0.9, seed=-1)]
Verify = Callable[[Draft, TargetOut, Sampler], Verdict]


def target_logits(text: list[int]) -> torch.Tensor:
    """A "target": any function of the tokens so far."""
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(hash(tuple(text))))


def plain_token(text: list[int], sampling: Sampling) -> int:
    """The token that plain decoding puts after a text."""
    return int(draw(target_logits(text)[None, None], torch.tensor([[len(text)]]), sampling))


def random_row(seed: int, nodes: int, present: int, text: list[int], sampling: Sampling, *, chain: bool):
    """A tree whose tokens are often the ones that plain decoding gives; nodes from `present` on are absent."""
    chooser = random.Random(seed)
    parents = list(range(-1, nodes - 1)) if chain else random_parents(seed, nodes)
    tokens: list[int] = []
    for node, parent in enumerate(parents):
        before = text + [tokens[i] for i in path_to(parents, parent)]
        free = set(range(VOCAB)) - {tokens[i] for i in range(node) if parents[i] == parent}
        right = plain_token(before, sampling)
        token = right if right in free and chooser.random() < 0.7 else chooser.choice(sorted(free))
        tokens.append(token if node < present else ABSENT)
    rows = [target_logits(text + [tokens[i] for i in path_to(parents, node)]) for node in range(-1, nodes)]
    return tokens, parents, torch.stack(rows)


def check(verify: Verify) -> int:
    """Fails unless `verify` accepts exactly what plain decoding gives; returns how many tokens it accepted."""
    accepted = 0
    for seed in range(36):
        sampling, chain, nodes = SAMPLINGS[seed % 3], seed % 2 == 0, seed % 5 + 1
        texts = [[seed, row] + [1] * row for row in range(3)]
        rows = [
            random_row(seed * 3 + row, nodes, nodes - row if row < nodes else nodes, text, sampling, chain=chain)
            for row, text in enumerate(texts)
        ]
        tokens, parents, logits = zip(*rows, strict=True)
        draft = Draft(tokens=torch.tensor(tokens), parents=torch.tensor(parents))
        out = TargetOut(logits=torch.stack(logits), hidden={})
        verdict = verify(draft, out, sampler(texts, sampling))
        for row, text in enumerate(texts):
            path, emitted = naive_walk(tokens[row], parents[row], text, sampling)
            assert verdict.paths[row] == path and verdict.tokens[row] == emitted
            accepted += len(path)
    return accepted


def naive_walk(tokens: list[int], parents: list[int], text: list[int], sampling: Sampling):
    """Decodes plainly, and goes down the tree as long as it holds the same tokens."""
    node, path, emitted = -1, list[int](), list[int]()
    while True:
        emitted.append(plain_token(text + emitted, sampling))
        below = [child for child, parent in enumerate(parents) if parent == node and tokens[child] == emitted[-1]]
        if not below:
            return path, emitted
        (node,) = below
        path.append(node)


def test_verdict_is_what_plain_decoding_gives() -> None:
    """Guards losslessness: the emitted tokens are plain decoding's, for ragged trees and chains, at any temperature."""
    assert check(verify) > 60, "a check in which nothing is accepted shows nothing"


def test_what_the_target_drew_is_told() -> None:
    """Guards drafters that learn from a round: the target's own token after the root and after every node, whether
    it was accepted or not."""
    for seed, sampling in enumerate(SAMPLINGS):
        text = [seed, 1, 2]
        tokens, parents, logits = random_row(seed, 5, 4, text, sampling, chain=False)
        draft = Draft(tokens=torch.tensor([tokens]), parents=torch.tensor([parents]))
        verdict = verify(draft, TargetOut(logits=logits[None], hidden={}), sampler([text], sampling))
        before = [[tokens[i] for i in path_to(parents, node)] for node in range(-1, 4)]
        assert verdict.drawn is not None and len(verdict.drawn[0]) == 6
        assert verdict.drawn[0][:5] == [plain_token(text + more, sampling) for more in before]


def test_after_a_node_that_is_absent_the_target_drew_nothing() -> None:
    """Guards drafters that learn from a round against what happens to stand where nothing was read: token 0 is a token.
    Nodes keep their places, also where those between them were cut off."""
    logits = torch.eye(10)[torch.tensor([[4, 5, 6, 7, 8], [3, 2, 1, 0, 9]])]
    tokens = torch.tensor([[4, ABSENT, 9, ABSENT], [ABSENT, 7, 3, 1]])
    draft = Draft(tokens=tokens, parents=torch.tensor([[-1, 0, -1, 2], [-1, -1, -1, 2]]))
    verdict = verify(draft, TargetOut(logits=logits, hidden={}), sampler([[1], [2]]))
    assert verdict.drawn == [[4, 5, ABSENT, 7, ABSENT], [3, ABSENT, 1, 0, 9]]
    assert verdict.tokens == [[4, 5], [3, 0]]


def always_accept(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Accepts the way to the deepest present node, whatever the target says."""
    depth_BN = depths(draft.parents).masked_fill(draft.tokens == ABSENT, -1)
    logits = out.logits.clone()
    for row in range(len(depth_BN)):
        path = path_to(draft.parents[row].tolist(), int(depth_BN[row].argmax()))
        for node in path:
            logits[row, draft.parents[row, node] + 1] = torch.eye(VOCAB)[draft.tokens[row, node]] * 1e6
    return verify(draft, TargetOut(logits=logits, hidden={}), sampler)


def bonus_after_rejection(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    return with_bonus(verify(draft, out, sampler), out)


def pad_is_zero(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Takes absent nodes for drafts of token 0, once per parent."""
    tokens = draft.tokens.clone()
    for row, node in (tokens == ABSENT).nonzero().tolist():
        siblings = draft.parents[row] == draft.parents[row, node]
        if not (tokens[row, siblings] == 0).any():
            tokens[row, node] = 0
    return verify(Draft(tokens=tokens, parents=draft.parents), out, sampler)


def noise_of_the_step(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Numbers its noise from the start of the round instead of the text."""
    sampler.lengths_B = torch.ones_like(sampler.lengths_B)
    return verify(draft, out, sampler)


@pytest.mark.parametrize("wrong", [always_accept, bonus_after_rejection, pad_is_zero, noise_of_the_step])
def test_the_check_catches_wrong_rules(wrong: Verify) -> None:
    """Control: a check that these rules pass would not guard losslessness."""
    with pytest.raises(AssertionError):
        check(wrong)


def test_empty_draft_is_plain_decoding() -> None:
    """Guards the rounds with K = 0."""
    logits = torch.eye(VOCAB)[torch.tensor([[3], [0]])]
    out = TargetOut(logits=logits, hidden={})
    verdict = verify(Draft.empty(2, torch.device("cpu")), out, sampler([[1], [1] * 9]))
    assert verdict.paths == [[], []] and verdict.tokens == [[3], [0]]


@pytest.mark.parametrize(
    ("tokens", "parents", "committed"),
    [
        ([5, 5], [-1, -1], [5, 6]),
        ([5, 6, 6], [-1, 0, 0], [5, 6, 7]),
        ([5, 6, 5], [-1, 0, -1], [5, 6, 7]),
        ([5, 5, 6, 6], [-1, -1, 0, 1], [5, 6, 7]),
    ],
)
def test_siblings_with_the_same_token_are_one_continuation(
    tokens: list[int], parents: list[int], committed: list[int]
) -> None:
    """Guards against a drafter that repeats itself: two accepted siblings would commit a token nobody verified, and
    the second must not cost what hangs below the first."""
    draft = Draft(tokens=torch.tensor([tokens]), parents=torch.tensor([parents]))
    logits = torch.eye(10)[[5, *(token + 1 for token in tokens)]][None]  # the target counts
    verdict = verify(draft, TargetOut(logits=logits, hidden={}), sampler([[1, 2, 3]]))
    assert len(verdict.paths[0]) == len(committed) - 1
    assert verdict.tokens == [committed]


@pytest.mark.parametrize("rule", rule_names())
def test_penalties_count_what_was_drafted_before_a_node(rule: str, tmp_path: Path) -> None:
    """Guards settings that read the text: the text before a node is that of its own branch."""
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0]).expand(1, 4, 4)
    draft = Draft(tokens=torch.tensor([[0, 0, 1]]), parents=torch.tensor([[-1, 0, 0]]))
    made = sampler([[3]], Sampling(presence_penalty=9.0), rule=rule)
    out = TargetOut(logits=logits, hidden={FINAL_NORM: torch.zeros(1, 4, 2)})
    verdict = load_rule(with_settings(rule, tmp_path, 2))(draft, out, made)
    assert verdict.paths == [[0, 2]]
    assert verdict.tokens == [[0, 1, 2]]
    if rule == "match":
        assert verdict.drawn == [[0, 1, 1, 2]]
