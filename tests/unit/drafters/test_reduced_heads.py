"""Drafts of models with a reduced output head: what is drawn, what is accepted, and what becomes text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paradraft.audit.audit import audit
from paradraft.audit.verdict import PASS
from paradraft.drafters.pard import Config, build
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.formats.vocab_map import VocabMap
from paradraft.models.runtime import Runtime
from paradraft.sampling.candidates import Candidates
from paradraft.sampling.distribution import best_token, filtered_logits
from paradraft.sampling.noise import gumbel_noise
from paradraft.sampling_params import Sampling
from paradraft.sources.loading import pocket_folder
from paradraft.sources.target_loading import load_target
from paradraft.tree import Tree
from paradraft.verify.match import accepted_path
from tests.conftest import VOCAB
from tests.support.decoding import started
from tests.support.reduced_heads import reduced_folder

PROMPTS = ["a", "helloworld", "abcabcabcabcabc", "The0quick1brown2fox"]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.0, top_k=20, seed=2, repetition_penalty=1.1),
    Sampling(temperature=0.8, top_p=0.9, seed=3, logit_bias={9: 2.0, 10: -3.0}),
]
HALF = list(range(0, VOCAB + 8, 2))
SHAPES = {"chain": None, "grown": Tree(budget=7), "fixed": Tree(paths=((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))}
EAGER, NATIVE = Runtime(dtype="float64", compiled=False), Runtime(dtype="float32")
DRAFTERS = {"pard": "pard", "autoregressive": "draft"}
"""The folder of each drafter's model."""


@pytest.fixture(scope="module")
def reduced(family: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each drafter a model with half of the rows, and one with all."""
    root = tmp_path_factory.mktemp("reduced")
    for name, folder in DRAFTERS.items():
        reduced_folder(family / folder, root / f"{name}-half", HALF)
        reduced_folder(family / folder, root / f"{name}-all", range(VOCAB + 8))
    return root


def engine(family: Path, drafter: str, draft: Path | None, runtime: Runtime = EAGER) -> Engine:
    name = None if draft is None else str(draft)
    return load(str(family / "target"), drafter=drafter, draft=name, k=4, runtime=runtime, lengths="fixed")


def with_rule(chains: Engine, verify: str, shape: str) -> Engine:
    speculation = Speculation(k=4, verify=verify, tree=SHAPES[shape], lengths="fixed")
    return Engine(chains.target, chains.drafter, speculation)


def answers(engine: Engine, samplings: Sequence[Sampling] = SAMPLINGS) -> list[tuple[list[int], int]]:
    """Tokens and rounds of each prompt, in one batch."""
    found = engine.generate(PROMPTS, max_new_tokens=[20, 15, 20, 9], sampling=samplings)
    return [(answer.tokens, answer.stats.rounds) for answer in found]


@pytest.mark.filterwarnings("ignore:verify='typical'")
@pytest.mark.parametrize("runtime", [EAGER, NATIVE], ids=["eager", "C++"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_all_rows_draft_as_the_whole_head(family: Path, reduced: Path, name: str, runtime: Runtime) -> None:
    """Guards the whole way through a map: with all ids not a token and not a round differs, under any rule and shape.
    With half of them the text under the match rule is the target's, and drafts are still accepted."""
    plain = [tokens for tokens, _ in answers(engine(family, "none", None, runtime))]
    folders = family / DRAFTERS[name], reduced / f"{name}-all", reduced / f"{name}-half"
    whole, every, half = (engine(family, name, folder, runtime) for folder in folders)
    for verify, shape in (*(("match", shape) for shape in SHAPES), ("rejection", "fixed"), ("typical", "grown")):
        expected, found = (answers(with_rule(each, verify, shape)) for each in (whole, every))
        assert found == expected, (verify, shape)
    for shape in SHAPES:
        found = answers(with_rule(half, "match", shape))
        assert [tokens for tokens, _ in found] == plain, shape
        assert sum(rounds for _, rounds in found) < 0.9 * sum(map(len, plain)), shape


def naive_drafts(logits_NV: Tensor, sampling: Sampling, position: int) -> list[int]:
    """What the match rule's draws of these ids alone are: the noise is that of an id and a position."""
    kept_NU = logits_NV[:, HALF[: VOCAB // 2]]
    if not sampling.is_greedy:
        positions_1N = torch.arange(position, position + len(logits_NV))[None]
        noise_NU = gumbel_noise(sampling.seed, positions_1N, VOCAB)[0][:, HALF[: VOCAB // 2]]
        kept_NU = filtered_logits(kept_NU, sampling) + noise_NU
    return [HALF[row] for row in best_token(kept_NU).tolist()]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=7)], ids=["greedy", "sampled"])
def test_the_noise_is_that_of_the_targets_id(family: Path, reduced: Path, sampling: Sampling) -> None:
    """Guards against noise by row, and ids that are mapped twice or not at all: drafts would only agree less often."""
    target = load_target(str(family / "target"), EAGER)
    drafters = [build(Config(draft=str(folder)), target, EAGER) for folder in (family / "pard", reduced / "pard-half")]
    whole, half = drafters
    text = [5, 3, 8]
    started(half, [text], [sampling])
    drafted = half.propose([4]).tokens[0].tolist()
    whole.lm.start()
    whole.lm.cache.join(1)
    masks = [whole.mask_id] * 3
    logits_NV = whole.lm.forward(torch.tensor([text + masks])).logits[0, 2:]
    assert drafted == naive_drafts(logits_NV, sampling, len(text))
    assert all(drafted), "0 is also the index of its row: choose another text"


def test_q_is_that_of_the_kept_ids(family: Path, reduced: Path) -> None:
    """Guards the rejection rule: q is the softmax over the kept ids, at their ids, and 0 elsewhere."""
    target = load_target(str(family / "target"), EAGER)
    whole, half = (
        build(Config(draft=str(folder)), target, EAGER) for folder in (family / "pard", reduced / "pard-half")
    )
    sampling = Sampling(temperature=0.8, seed=7)
    started(half, [[5, 3, 8]], [sampling], rule="rejection")
    draft = half.propose([1])
    whole.lm.start()
    whole.lm.cache.join(1)
    kept_U = whole.lm.forward(torch.tensor([[5, 3, 8]])).logits[0, 2, HALF[: VOCAB // 2]]
    expected_V = torch.zeros(VOCAB, dtype=torch.float64)
    expected_V[HALF[: VOCAB // 2]] = (kept_U / 0.8).softmax(0)
    assert draft.probs is not None
    assert torch.allclose(draft.probs[0, 0], expected_V, rtol=1e-9, atol=0)
    assert float(draft.probs[0, 0, int(draft.tokens[0, 0])]) > 0


def at_rows(self: VocabMap, logits: Tensor, vocab_size: int) -> Tensor:
    """Each row's logit at the row's index."""
    return torch.nn.functional.pad(logits, (0, vocab_size), value=-torch.inf)[..., :vocab_size]


def at_ids_of_ids(self: VocabMap, logits: Tensor, vocab_size: int) -> Tensor:
    """Mapped twice, as far as there are rows."""
    ids = self.to_target[self.to_target.clamp(max=len(self.to_target) - 1)]
    whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    return whole.scatter_(-1, ids.expand_as(logits[..., : len(ids)]), logits[..., : len(ids)])


def noise_of_rows(seed: Tensor, positions_BN: Tensor, vocab_size: int) -> Tensor:
    """The noise of a row's index in place of that of its id."""
    noise = gumbel_noise(seed, positions_BN, vocab_size)
    kept = HALF[: vocab_size // 2]
    return noise.index_copy(-1, torch.tensor(kept), noise[..., : len(kept)].clone())


@pytest.mark.parametrize("fault", [at_rows, at_ids_of_ids, noise_of_rows])
def test_wrong_ids_are_caught(
    family: Path, reduced: Path, fault: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the two tests above."""
    sampling = Sampling(temperature=0.8, seed=7)
    if fault is noise_of_rows:
        monkeypatch.setattr("paradraft.sampling.sampler.gumbel_noise", fault)
    else:
        monkeypatch.setattr(VocabMap, "spread", fault)
        with pytest.raises(AssertionError):
            test_q_is_that_of_the_kept_ids(family, reduced)
    with pytest.raises(AssertionError):
        test_the_noise_is_that_of_the_targets_id(family, reduced, sampling)


@pytest.mark.parametrize("shape", ["chain", "fixed"])
def test_rejection_keeps_the_targets_distribution(family: Path, reduced: Path, shape: str) -> None:
    """Guards q=0 through whole rounds (false alarm 1e-6). The audit contains a control that must be caught."""
    half = with_rule(engine(family, "pard", reduced / "pard-half"), "rejection", shape)
    sampling = Sampling(temperature=0.7, top_k=20, seed=10)
    report = audit(half, PROMPTS, sampling=sampling, seeds=16, max_new_tokens=20, batch_size=16, report=lambda _: None)
    assert report.verdict == PASS, report.reason
    assert report.acceptance_length > 1.02


class Only:
    """A processor that allows ids of one parity: that of a text's length, or always odd ones."""

    def __init__(self, *, always_odd: bool) -> None:
        self._always_odd = always_odd

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        first = 0 if self._always_odd else (ids.shape[1] % 3 != 0)
        scores[:, int(first) :: 2] = -torch.inf
        return scores


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_ids_without_a_row_may_be_all_that_is_allowed(family: Path, reduced: Path, name: str, verify: str) -> None:
    """Guards grammars: where they allow no id that the draft model can say, nothing is drafted. Such logits were called
    damaged, and the answer failed."""
    settings = [Sampling(temperature=temperature, seed=4) for temperature in (0.0, 0.8)]
    samplings = [
        Sampling(temperature=each.temperature, seed=4, processors=(Only(always_odd=odd),))
        for odd, each in ((True, settings[0]), (True, settings[1]), (False, settings[0]), (False, settings[1]))
    ]
    half = engine(family, name, reduced / f"{name}-half")
    plain = [tokens for tokens, _ in answers(engine(family, "none", None), samplings)]
    for shape in SHAPES:
        found = answers(with_rule(half, verify, shape), samplings)
        for row, (tokens, rounds) in enumerate(found):
            assert rounds == len(tokens) if row < 2 else rounds < len(tokens), (shape, row)
            if verify == "match" or row % 2 == 0:
                assert tokens == plain[row], (shape, row)


def test_failing_where_nothing_can_be_drafted_is_caught(
    family: Path, reduced: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the test above."""
    monkeypatch.setattr(Candidates, "without_closed", lambda self, logits: self)
    with pytest.raises(ValueError, match="the draft model's largest logit is NaN or infinite"):
        test_ids_without_a_row_may_be_all_that_is_allowed(family, reduced, "pard", "match")


def test_an_absent_token_is_never_accepted() -> None:
    """Guards drafters that verify guesses: where nothing can be drawn, an absent guess would equal it."""
    assert accepted_path([-1, 5, -1], [-1, -1, 1], [-1, 5, -1, 0]) == []
    assert accepted_path([5, -1], [-1, 0], [5, -1, 0]) == [0]


def test_the_shipped_model_with_half_of_its_rows(tmp_path: Path) -> None:
    """Guards a real model in C++, with a previous-token head that draws in C++: the text is the target's own; with all
    rows the rounds are those of the whole head."""
    source = pocket_folder("pard")
    folders = [
        None,
        reduced_folder(source, tmp_path / "all", range(4096)),
        reduced_folder(source, tmp_path / "half", [*range(0, 256), *range(257, 4088, 2), 4088]),
    ]
    prompts = ["def read_lines(path):", "class Queue:", "import os"]
    samplings = [Sampling(), Sampling(temperature=0.8, seed=1), Sampling(temperature=0.8, top_k=40, seed=2)]

    def said(engine: Engine) -> list[tuple[list[int], int]]:
        found = engine.generate(prompts, max_new_tokens=24, sampling=samplings)
        return [(answer.tokens, answer.stats.rounds) for answer in found]

    plain = [tokens for tokens, _ in said(load("pocket", drafter="none", lengths="fixed"))]
    engines = [load("pocket", drafter="pard", draft=folder, lengths="fixed") for folder in folders]
    for shape in ("chain", "grown"):
        whole, every, half = (said(with_rule(each, "match", shape)) for each in engines)
        assert every == whole
        assert [tokens for tokens, _ in half] == plain
        assert sum(rounds for _, rounds in half) < 0.9 * sum(map(len, plain))
