"""The judge accepts what its head takes for harmless, the target's own tokens before that, and nothing forbidden."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paradraft import load
from paradraft.audit.audit import audit
from paradraft.core import INVALID, Draft, Request, TargetOut, Verdict
from paradraft.formats.judge_head import read_judge
from paradraft.models.forward import FINAL_NORM
from paradraft.models.runtime import Runtime
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.tree import ABSENT
from paradraft.verify import load_rule
from paradraft.verify.match import verify as match
from tests.support.judges import ALWAYS, NEVER, written_judge
from tests.support.trees import random_parents

V = 8
EXACT = Runtime(dtype="float64")
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, seed=3), Sampling(temperature=1.4, top_k=3, seed=1)]
GOOD = torch.tensor([1.0, 0.0])
"""A state that the head of `harmless_where_good` takes for harmless."""


@pytest.fixture
def harmless_where_good(tmp_path: Path) -> str:
    """A rule that accepts tokens with the state `GOOD`."""
    return written_judge(tmp_path, torch.tensor([8.0, 0.0]), -4.0)


def random_case(seed: int, rows: int = 4, nodes: int = 7) -> tuple[Draft, TargetOut]:
    """Trees whose siblings differ."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.tensor([random_parents(100 * seed + row, nodes) for row in range(rows)])
    ranks = (parents[:, None, :] == parents[:, :, None]).tril(-1).sum(2)
    tokens = (torch.randint(V, (rows, nodes + 1), generator=generator).gather(1, parents + 1) + ranks) % V
    absent = torch.arange(nodes) >= torch.tensor([[nodes - row] for row in range(rows)])
    draft = Draft(tokens=tokens.masked_fill(absent, ABSENT), parents=parents)
    logits = torch.randn(rows, nodes + 1, V, generator=generator) * 2
    return draft, TargetOut(logits=logits, hidden={FINAL_NORM: torch.randn(rows, nodes + 1, 2, generator=generator)})


def sampler_of(sampling: Sampling, rows: int) -> Sampler:
    return Sampler([Request(tokens=[1] * (row + 1), sampling=sampling, id=row) for row in range(rows)])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_head_that_trusts_nothing_is_match(tmp_path: Path, sampling: Sampling) -> None:
    rule = load_rule(written_judge(tmp_path, 2, NEVER))
    for seed in range(30):
        draft, out = random_case(seed)
        expected = match(draft, out, sampler_of(sampling, 4))
        assert rule(draft, out, sampler_of(sampling, 4)).tokens == expected.tokens


def walked(draft: Draft, row: int, drawn: list[int], good: list[bool]) -> list[int]:
    """The path as the rule's text describes it: own tokens first, then the harmless one."""
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    path: list[int] = []
    while True:
        place = path[-1] if path else -1
        children = [node for node in range(len(tokens)) if parents[node] == place and tokens[node] != ABSENT]
        own = [node for node in children if tokens[node] == drawn[place + 1]]
        harmless = [node for node in children if good[node]]
        if not own + harmless:
            return path
        path.append((own + harmless)[0])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_it_accepts_harmless_tokens_after_the_targets_own(harmless_where_good: str, sampling: Sampling) -> None:
    """Guards the walk and the place of states: that of a drafted token is the one after it."""
    chooser, more = torch.Generator().manual_seed(0), 0
    for seed in range(40):
        draft, out = random_case(seed)
        good_BN = torch.rand(draft.tokens.shape, generator=chooser) < 0.4
        states = torch.zeros(4, 8, 2)
        states[:, 1:][good_BN] = GOOD
        states[:, 0] = GOOD  # of the last committed token
        out = TargetOut(logits=out.logits, hidden={FINAL_NORM: states})
        allowed = sampler_of(sampling, 4).scores(out.logits, torch.zeros(4, 8, dtype=torch.long)).isfinite()
        drawn = match(draft, out, sampler_of(sampling, 4)).drawn
        verdict = load_rule(harmless_where_good)(draft, out, sampler_of(sampling, 4))
        assert drawn is not None
        for row, path in enumerate(verdict.paths):
            nodes = zip(good_BN[row].tolist(), *(each[row] for each in draft.lists), strict=True)
            good = [is_good and bool(allowed[row, parent + 1, token]) for is_good, token, parent in nodes]
            assert path == walked(draft, row, drawn[row], good)
            assert verdict.tokens[row][-1] == drawn[row][path[-1] + 1 if path else 0]
            more += len(path)
    assert more > 60


def verdict_of(rule: str, tokens: list[int], logits: Tensor, sampling: Sampling) -> Verdict:
    draft = Draft.chain(torch.tensor([tokens]))
    states = GOOD.expand(1, len(tokens) + 1, 2)
    return load_rule(rule)(draft, TargetOut(logits=logits[None], hidden={FINAL_NORM: states}), sampler_of(sampling, 1))


def test_what_a_request_forbids_is_never_accepted(harmless_where_good: str) -> None:
    """Guards schemas and biases against a head that knows nothing of them; a control accepts the token."""
    logits = torch.zeros(3, V)
    logits[:, 0] = 1.0
    assert verdict_of(harmless_where_good, [2, 3], logits, Sampling()).tokens == [[2, 3, 0]]
    banned = Sampling(logit_bias={3: -torch.inf})
    assert verdict_of(harmless_where_good, [2, 3], logits, banned).tokens == [[2, 0]]
    cut = Sampling(temperature=1.0, top_k=1)
    assert verdict_of(harmless_where_good, [2, 3], logits, cut).tokens == [[0]]


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_logits_that_are_no_numbers_end_the_text(
    harmless_where_good: str, place: int, broken: float, sampling: Sampling
) -> None:
    """Guards requests whose logits are broken at one token, which is not the drafted one."""
    logits = torch.zeros(3, V)
    logits[:, 2:4] = 1.0
    logits[place, 5] = broken
    verdict = verdict_of(harmless_where_good, [2, 3], logits, sampling)
    assert verdict.paths == [[*range(place)]] and verdict.tokens[0][-1] == INVALID


def test_the_targets_own_tokens_are_known(harmless_where_good: str) -> None:
    """Guards drafters that learn from them."""
    for seed in range(10):
        draft, out = random_case(seed)
        out = TargetOut(logits=out.logits, hidden={FINAL_NORM: GOOD.expand(4, 8, 2)})
        verdicts = (rule(draft, out, sampler_of(SAMPLINGS[1], 4)) for rule in (load_rule(harmless_where_good), match))
        judged, matched = verdicts
        assert judged.drawn == matched.drawn and judged.paths != matched.paths


@pytest.mark.parametrize("drafter", ["ngram", "pard", "eagle_parallel"])
def test_states_reach_the_rule_in_every_round(tmp_path: Path, drafter: str) -> None:
    """Guards the seam, in C++ and with drafters that read states of the target and that do not: a head that accepts
    everything accepts it, and one that accepts nothing leaves the target's text."""
    plain = load("pocket")
    size = plain.target.lm.model.config.hidden_size
    prompts = ["def add(a, b):", "class Stack:\n    def push(self"]
    engines = []
    for bias in (NEVER, ALWAYS):
        with pytest.warns(UserWarning, match="judge decoding is not lossless"):
            engines.append(
                load("pocket", drafter=drafter, k=3, verify=written_judge(tmp_path, size, bias), lengths="fixed")
            )
    never, always = (engine.generate(prompts, max_new_tokens=33) for engine in engines)
    expected = [answer.tokens for answer in plain.generate(prompts, max_new_tokens=33)]
    assert [answer.tokens for answer in never] == expected != [answer.tokens for answer in always]
    assert all(answer.stats.accepted == answer.stats.drafted for answer in always)


@pytest.mark.filterwarnings("ignore")
def test_a_drafter_that_learns_from_the_targets_tokens_learns_from_these(tmp_path: Path) -> None:
    """Guards lookahead, which drafted hardly anything without them: with a head that accepts nothing it is as good as
    under match."""
    size = load("pocket").target.lm.model.config.hidden_size
    never, matched = (
        load("pocket", drafter="lookahead", verify=rule, lengths="fixed").generate("def add(a, b):", max_new_tokens=40)
        for rule in (written_judge(tmp_path, size, NEVER), "match")
    )
    assert never.tokens == matched.tokens
    assert sum(never.stats.accepted) == sum(matched.stats.accepted) > 5


def test_it_cannot_be_audited(family: Path, tmp_path: Path) -> None:
    size = load(str(family / "target"), runtime=EXACT).target.lm.model.config.hidden_size
    with pytest.warns(UserWarning, match="not lossless"):
        engine = load(
            str(family / "target"), drafter="ngram", verify=written_judge(tmp_path, size, NEVER), runtime=EXACT,
            lengths="fixed",
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"judge decoding is not lossless.*use match"):
        audit(engine, ["abc"], sampling=Sampling(), seeds=1, max_new_tokens=4, batch_size=1, report=lambda text: None)


def test_mistakes(family: Path, tmp_path: Path) -> None:
    """Guards users: what is wrong with a head is said before the first token."""
    rule = written_judge(tmp_path, 3, 0.0)
    with pytest.raises(ValueError, match=r"reads states of 3 numbers, this target has \d+: train another"):
        load(str(family / "target"), drafter="ngram", verify=rule, runtime=EXACT, lengths="fixed")
    with pytest.raises(ValueError, match="verify='judge': it needs a head: write judge:head=FILE"):
        load_rule("judge")
    with pytest.raises(ValueError, match=r"threshold=1\.0: use a number between 0 and 1"):
        load_rule(f"{rule}:threshold=1")
    with pytest.raises(ValueError, match="gone' does not exist: name a file that paradraft train-judge has written"):
        load_rule("judge:head=gone")
    (tmp_path / "other").write_bytes(b"no head")
    with pytest.raises(ValueError, match="other' is no judge"):
        load_rule(f"judge:head={tmp_path / 'other'}")
    for wrong in (torch.full((2,), torch.nan), torch.ones(1, 2)):
        with pytest.raises(ValueError, match="is no judge"):
            load_rule(written_judge(tmp_path, wrong, 0.0))
    kept = read_judge(Path(rule.removeprefix("judge:head=")))
    assert kept.weights.tolist() == [0.0] * 3 and kept.threshold == 0.5
