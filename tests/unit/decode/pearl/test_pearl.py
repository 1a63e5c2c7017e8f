"""PEARL: what is drafted ahead, what of it is kept, and that nothing becomes text that the target has not said."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from paradraft.core import Committed, Draft, Request, TargetOut, Verdict
from paradraft.decode.batch import Batch
from paradraft.decode.generation import Generation
from paradraft.decode.lengths.draft_length import Fixed
from paradraft.decode.pearl.pearl import AheadBatch
from paradraft.drafters.autoregressive import AutoregressiveDrafter
from paradraft.drafters.pard import PardDrafter
from paradraft.drafters.parts.text_drafter import TextDrafter
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.causal_lm import CausalLM
from paradraft.models.runtime import Runtime
from paradraft.models.target import Target
from paradraft.parents import texts_before
from paradraft.ragged import from_lists, to_lists
from paradraft.sampling.sampler import Sampler
from paradraft.sampling_params import Sampling
from paradraft.traits import Traits
from paradraft.tree import ABSENT, Tree
from paradraft.verify import match
from tests.conftest import VOCAB, tiny_model, tiny_tokenizer
from tests.support.decoding import Varying, answers, decoded, requests, target_of
from tests.support.drafts import draft_of

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10], [3, 3, 3]]
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=1.2, top_k=12, seed=2),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=0.7, presence_penalty=0.5, seed=3),
]
EAGER, CPP = False, None
COMPILED = [pytest.param(EAGER, id="eager"), pytest.param(CPP, id="C++")]
PERFECT, POOR = 1, 2
"""Seeds of draft models."""


def model(seed: int, compiled: bool | None, **settings: int) -> CausalLM:
    return CausalLM(tiny_model(seed).float(), vocab_size=VOCAB, compiled=compiled, **settings)


def autoregressive(lm: CausalLM) -> AutoregressiveDrafter:
    return AutoregressiveDrafter(lm)


def pard(lm: CausalLM) -> PardDrafter:
    return PardDrafter(lm, VOCAB + 1)


@pytest.mark.parametrize(
    ("gamma", "compiled", "drafter", "seed"),
    [
        (2, EAGER, autoregressive, PERFECT),
        (2, CPP, pard, POOR),
        (5, EAGER, pard, POOR),
        (5, CPP, autoregressive, PERFECT),
        (14, EAGER, pard, PERFECT),
        (14, CPP, autoregressive, POOR),
    ],
)
def test_text_is_that_of_plain_decoding(
    gamma: int, compiled: bool | None, drafter: Callable[[CausalLM], Any], seed: int
) -> None:
    """Guards the promise of the library, in a batch whose rows are each in their mode, with rows that end, and windows
    that are longer than a prompt and than the room left. Every pair of settings occurs."""
    target = target_of(model(1, compiled))
    asked = requests(PROMPTS, SAMPLINGS, [30, 7, 1, 12, 40], eos_ids=frozenset([17]))
    plain = answers(Batch(target, NoDrafts(), lengths=Fixed(0)), asked)
    batch = AheadBatch(target, drafter(model(seed, compiled)), lengths=Fixed(gamma))
    assert answers(batch, asked) == plain
    batch = AheadBatch(target, drafter(model(seed, compiled)), lengths=Varying(gamma))
    assert answers(batch, asked) == plain


@pytest.mark.parametrize(
    ("overlap", "compiled", "drafter"),
    [("pre", EAGER, autoregressive), ("pre", CPP, pard), ("post", CPP, autoregressive), ("post", EAGER, pard)],
)
def test_one_strategy_alone(overlap: str, compiled: bool | None, drafter: Callable[[CausalLM], Any]) -> None:
    """Guards the text without pre-verify, where a window is drafted before it is read ahead of, and without
    post-verify; and that each is what its name says."""
    target = target_of(model(1, compiled))
    asked = requests(PROMPTS, SAMPLINGS, [30, 7, 1, 12, 40], eos_ids=frozenset([17]))
    plain = answers(Batch(target, NoDrafts(), lengths=Fixed(0)), asked)
    for seed in (1, 2):
        batch = AheadBatch(target, drafter(model(seed, compiled)), lengths=Fixed(4), overlap=overlap)
        assert answers(batch, asked) == plain
    if drafter is autoregressive and not compiled:
        batch = AheadBatch(target, autoregressive(model(1, compiled)), lengths=Fixed(4), overlap=overlap)
        steps = decoded(batch, requests(PROMPTS[:1], Sampling(), 17))
        emitted = [len(step.tokens[0]) for step in steps]
        assert emitted == ([1, 4, 1, 4, 1, 4, 1, 1] if overlap == "pre" else [5, 4, 4, 4])


class NoDrafts(TextDrafter):
    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        return Draft.empty(len(lengths), self.device)


@pytest.mark.parametrize("in_pieces", [False, True], ids=["whole", "in pieces"])
@pytest.mark.parametrize("compiled", COMPILED)
def test_rows_join_and_leave(compiled: bool | None, in_pieces: bool) -> None:
    """Guards drafts that are verified in the row of another request, also where its prompt is read beside rounds."""
    target, drafter = target_of(model(1, compiled)), autoregressive(model(1, compiled))
    asked = requests(PROMPTS, SAMPLINGS, [30, 7, 9, 12, 40])
    plain = answers(Batch(target, NoDrafts(), lengths=Fixed(0)), asked)
    batch = AheadBatch(target, drafter, lengths=Fixed(4))
    found = list(map(Generation, asked))
    batch.join(found[:2])
    for generation in found[2:]:
        for _ in range(2):
            batch.step()
        if in_pieces:
            batch.begin([generation])
        while batch.prefill.generations:
            batch.read(1)
            batch.read_along(2)
            batch.step()
        if not in_pieces:
            batch.join([generation])
    while not batch.is_finished:
        batch.step()
    assert [generation.tokens for generation in found] == plain


def test_a_perfect_draft_is_accepted_window_by_window() -> None:
    """Guards windows that are dropped though all of them was right: after the first round, γ tokens a round; and drafts
    that are longer than the room, of which the last token would be the target's own."""
    lm = model(1, False)
    steps = decoded(
        AheadBatch(target_of(lm), autoregressive(model(1, False)), lengths=Fixed(5)),
        requests(PROMPTS[:1], Sampling(), 23),
    )
    assert [len(step.tokens[0]) for step in steps] == [1, 5, 5, 5, 5, 2]
    assert [step.accepted[0] for step in steps] == [0, 4, 4, 4, 4, 1]


def test_draft_model_passes() -> None:
    """Guards drafts that are read twice a round: γ passes a window, the first of them over all that is not read."""
    draft = autoregressive(model(1, False))
    decoded(AheadBatch(target_of(model(1, False)), draft, lengths=Fixed(4)), requests(PROMPTS[:1], Sampling(), 21))
    assert sorted(one.tokens for one in draft.lm.passes.elements()) == [1] * 5 * 3 + [3, 4, 4, 4, 4]


class Scripted(TextDrafter):
    """Goes on as the first of some texts that begins with what it has read."""

    traits = Traits(can_run_ahead=True)

    def __init__(self, script: list[list[int]]) -> None:
        self.script = script
        self.windows: list[list[int]] = []

    def propose(self, lengths: Sequence[int], after: Draft | None = None) -> Draft:
        assert after is not None
        text = [*self.texts[0][1:], *(token for token in after.tokens[0].tolist() if token != ABSENT)]
        known = next(line for line in self.script if line[: len(text)] == text)
        self.windows.append(known[len(text) : len(text) + lengths[0]])
        return Draft.chain(from_lists([self.windows[-1]]))


class ScriptedTarget(Target):
    """Says one text, whatever the drafter says."""

    def __init__(self, lm: CausalLM, text: list[int]) -> None:
        super().__init__(lm, tiny_tokenizer())
        self.text, self.said = text, 0

    def forward(self, draft: Draft) -> TargetOut:
        out = super().forward(draft)
        before = texts_before(draft.tokens, draft.parents)
        places = self.said + (before[0] != ABSENT).sum(1)
        tokens = [self.text[min(int(place), len(self.text) - 1)] for place in places]
        return TargetOut(logits=torch.nn.functional.one_hot(torch.tensor([tokens]), VOCAB).float(), hidden=out.hidden)

    def commit(self, verdict: Verdict, out: TargetOut) -> Committed:
        committed = super().commit(verdict, out)
        self.said += sum(map(len, committed.tokens))
        return committed


def test_the_walk_through_of_the_paper() -> None:
    """Appendix B, Table 9 (γ = 5): the output prefixes of steps 0 to 7. The prose contradicts the table where it says
    that step 4 rejects "you"; the table's "this" is what the draft has there."""
    right = "I ' m happy to help you with your question ! However , I notice that the"
    drafts = [
        "Great , I ' m",
        "I ' m gl ad you are interested in explor ing",
        "I ' m happy to help you with this equation ! However , I",
        f"{right} equation you provided is not correct .",
    ]
    text = f"{right} equations"
    words = sorted({word for line in drafts for word in line.split()} | {"equations"})
    ids = {word: number + 1 for number, word in enumerate(words)}
    drafter = Scripted([[ids[word] for word in line.split()] for line in drafts])
    target = ScriptedTarget(model(1, False), [ids[word] for word in text.split()])
    batch = AheadBatch(target, drafter, lengths=Fixed(5))
    generation = Generation(Request(id=0, tokens=[VOCAB - 1], max_new_tokens=60))
    batch.join([generation])
    prefixes, modes = [], []
    for _ in range(8):
        modes.append("post" if batch.ahead.tokens.shape[1] else "pre")
        batch.step()
        prefixes.append(" ".join(words[token - 1] for token in generation.tokens))
    assert prefixes == [
        "I",
        "I '",
        "I ' m happy",
        "I ' m happy to",
        "I ' m happy to help you with your",
        "I ' m happy to help you with your question",
        "I ' m happy to help you with your question ! However , I notice",
        text,
    ]
    assert modes == ["pre", "pre", "post", "pre", "post", "pre", "post", "post"]
    assert [" ".join(words[token - 1] for token in window) for window in drafter.windows] == [
        "Great , I ' m", "' m gl ad you", "are interested in explor ing", "to help you with this",
        "equation ! However , I", "question ! However , I", "notice that the equation you", "provided is not correct .",
    ]  # fmt: skip


def off_by_one(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """Algorithm 2, lines 29 and 32, taken literally: what follows x_1 ... x_i is compared with x_i."""
    later = TargetOut(logits=torch.cat([out.logits[:, 1:], out.logits[:, -1:]], dim=1), hidden=out.hidden)
    return match.verify(draft, later, sampler)


def unverified_tail(draft: Draft, out: TargetOut, sampler: Sampler) -> Verdict:
    """The public code's answer, which ends with what was drafted."""
    paths = [list(range(len(tokens))) for tokens in to_lists(draft.tokens)]
    drawn = sampler.draw(out.logits, torch.arange(out.logits.shape[1])[None].expand(len(paths), -1)).tolist()
    return Verdict.of(draft, paths, [own[len(path)] for own, path in zip(drawn, paths, strict=True)])


@pytest.mark.parametrize("wrong", [off_by_one, unverified_tail])
def test_what_is_known_to_be_wrong_is_noticed(wrong: Any) -> None:
    """Guards the tests above: verification as in the paper's pseudocode, or as its code ends, gives another text."""
    target = target_of(model(1, False))
    asked = requests(PROMPTS, Sampling(), 30)
    plain = answers(Batch(target, NoDrafts(), lengths=Fixed(0)), asked)
    drafter = autoregressive(model(2, False))
    assert answers(AheadBatch(target, drafter, lengths=Fixed(4), verify=match.verify), asked) == plain
    assert answers(AheadBatch(target, drafter, lengths=Fixed(4), verify=wrong), asked) != plain


def test_an_error_on_one_side_is_told_once_the_other_has_ended() -> None:
    """Guards a drafter that goes on with the rows of a batch that has failed, beside the next batch."""
    lm = model(1, False)
    target, drafter = target_of(lm), autoregressive(model(2, False))
    batch = AheadBatch(target, drafter, lengths=Fixed(4))
    batch.join([Generation(Request(id=0, tokens=[1, 2], max_new_tokens=20))])
    batch.step()

    def fail(*given: Any, **named: Any) -> Any:
        raise RuntimeError("no drafts today")

    drafter.lm.forward = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no drafts today"):
        batch.step()
    del drafter.lm.forward
    asked = requests(PROMPTS, Sampling(), 20)
    batch.clear()
    assert answers(batch, asked) == answers(Batch(target, NoDrafts(), lengths=Fixed(0)), asked)


def test_a_second_batch_starts_anew() -> None:
    """Guards it against the drafts of the first."""
    target, drafter = target_of(model(1, False)), autoregressive(model(1, False))
    asked = requests(PROMPTS, SAMPLINGS, 20)
    batch = AheadBatch(target, drafter, lengths=Fixed(4))
    assert answers(batch, asked) == answers(batch, asked)
    assert answers(batch, asked) == answers(Batch(target, drafter, lengths=Fixed(4)), asked)


@pytest.mark.parametrize(
    ("name", "gamma", "runtime"),
    [
        ("autoregressive", 2, Runtime(dtype="float64", compiled=False)),
        ("autoregressive", 7, Runtime(dtype="float32")),
        ("pard", 2, Runtime(dtype="float32")),
        ("pard", 7, Runtime(dtype="float64", compiled=False)),
    ],
)
def test_engines_draft_ahead(family: Path, name: str, gamma: int, runtime: Runtime) -> None:
    """Guards stop strings and ends within a window, streams, and conversations whose caches are kept."""
    target, draft = str(family / "target"), draft_of(family, name)
    plain = load(target, runtime=runtime)
    engine = load(target, drafter=name, draft=draft, gamma=gamma, kept_rows=2, runtime=runtime)
    texts = ["hello", "abcabc", "T", "The0quick1"]
    stop = plain.generate("hello", max_new_tokens=12).text[5:7]
    settings: dict[str, Any] = {"max_new_tokens": 30, "stop": [stop], "sampling": [*SAMPLINGS[:3], SAMPLINGS[4]]}
    found, expected = (each.generate(texts, batch_size=3, **settings) for each in (engine, plain))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    assert [answer.text for answer in found] == [answer.text for answer in expected]
    assert [answer.finish_reason for answer in found] == [answer.finish_reason for answer in expected]
    chunks = list(engine.stream("hello", max_new_tokens=20))
    assert "".join(chunk.text for chunk in chunks) == plain.generate("hello", max_new_tokens=20).text
    follow = [[*range(1, 9), *answer.tokens, 5] for answer in expected[:2]]
    for _ in range(2):
        again, same = (each.generate(follow, max_new_tokens=15) for each in (engine, plain))
        assert [answer.tokens for answer in again] == [answer.tokens for answer in same]
        follow = [[*prompt, *answer.tokens, 6] for prompt, answer in zip(follow, same, strict=True)]


def test_gamma_is_measured(family: Path) -> None:
    """Guards a measured γ that is not used, or is out of range."""
    target = str(family / "target")
    engine = load(target, drafter="autoregressive", draft=target, k=6, gamma="auto")
    gamma = engine.speculation.gamma
    assert isinstance(gamma, int) and 2 <= gamma <= 6 and engine.speculation.k == gamma
    assert (
        engine.generate("hello", max_new_tokens=20).tokens == load(target).generate("hello", max_new_tokens=20).tokens
    )


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"gamma": 1}, "gamma=1: draft 2 to 256 tokens ahead, or auto"),
        ({"gamma": "fast"}, "gamma='fast'"),
        ({"gamma": 4, "drafter": "ngram"}, "drafter 'ngram' cannot draft ahead, use autoregressive or pard"),
        ({"gamma": 4, "drafter": "none"}, "drafter 'none' cannot draft ahead"),
        ({"gamma": 4, "verify": "rejection"}, "use verify='match' to draft ahead"),
        ({"gamma": 4, "lengths": "expected"}, "use lengths='fixed' to draft ahead"),
        ({"overlap": "pre"}, "overlap='pre' is for drafting ahead: set gamma too"),
        ({"gamma": 4, "overlap": "none"}, "overlap='none': use one of both, pre, post"),
        ({"gamma": 4, "tree": Tree(budget=6)}, "leave the tree out"),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Speculation(**{"drafter": "autoregressive", "draft": "x", **settings})


def test_a_window_that_is_interrupted(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards caches that are still being written when the next request comes: it waits until the drafter is done."""
    target = str(family / "target")
    engine = load(target, drafter="autoregressive", draft=target, gamma=4, runtime=Runtime(dtype="float64"))
    expected, propose, is_working = engine.generate("hello", max_new_tokens=30).tokens, engine.drafter.propose, []

    def slow(*given: Any) -> Draft:
        is_working.append(True)
        if len(is_working) == 5:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.3)
        found = propose(*given)
        is_working.append(False)
        return found

    start = engine.drafter.start

    def started(*given: Any) -> None:
        assert not is_working or not is_working[-1], "the drafter is still at work"
        start(*given)

    monkeypatch.setattr(engine.drafter, "propose", slow)
    monkeypatch.setattr(engine.drafter, "start", started)
    with pytest.raises(KeyboardInterrupt):
        engine.generate("hello", max_new_tokens=30)
    assert engine.generate("hello", max_new_tokens=30).tokens == expected


def test_what_cannot_be_measured(family: Path) -> None:
    """Guards people who leave the number to us against a complaint about one that they did not give."""
    target = str(family / "target")
    with pytest.raises(ValueError, match="gamma='auto' drafts at most k tokens ahead, and at least 2: k=1 is too few"):
        Speculation(drafter="autoregressive", draft=target, gamma="auto", k=1)
    with pytest.raises(ValueError, match="capacity=2 is too small to measure it"):
        load(target, drafter="autoregressive", draft=target, gamma="auto", runtime=Runtime(capacity=2))
