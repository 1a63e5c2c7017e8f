"""The audit of a server: honest ones pass, lossy ones fail, each with the right reason.

Tests of a distribution fail by chance with a probability of at most 1e-6 (`uniformity.FALSE_ALARM`), and with fixed
seeds as here either always or never.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from paradraft.audit.server.draft_passes import DraftModel
from paradraft.audit.server.endpoint import AuditedServer
from paradraft.audit.server.endpoint_audit import audit_endpoint
from paradraft.audit.server.served import ServedReport
from paradraft.audit.server.tables import ModelReference, Reference, ServerReference
from paradraft.audit.verdict import FAIL, INCONCLUSIVE, PASS, TIES
from paradraft.cli.commands.audit_served import findings
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.models.runtime import Runtime
from paradraft.sources.target_loading import load_target
from tests.conftest import VOCAB, tiny_tokenizer
from tests.support.fake_engine import MODEL, Decoding, Draw, FakeEngine, Plain, Rows, Telling, lossless, pard
from tests.support.quick import mostly_slow
from tests.support.serving import MODEL as OURS
from tests.support.serving import Serving, serving

ENDS = frozenset({0})
MASK = VOCAB + 1
PROMPTS = ["helloworld", "abcabcabcabc", "xyz", "The0quick1brown"]
CHAT = [[{"role": "user", "content": text}] for text in PROMPTS]
TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking is not defined or enable_thinking %}T{% else %}N{% endif %}"
    "{% endif %}"
)
BY_NAME = Telling(knows=())
"""Of a server that knows none of vLLM's parameters: it names tokens by their texts, and tells no ids of prompts."""


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Passes of such models take longer with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    found = tiny_tokenizer()
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def models(family: Path) -> dict[str, PreTrainedModel]:
    return {
        name: AutoModelForCausalLM.from_pretrained(family / name, dtype=torch.float64).eval()
        for name in ("target", "draft", "pard")
    }


@pytest.fixture(scope="module")
def target(models: Mapping[str, PreTrainedModel]) -> Plain:
    return Plain(models["target"])


@pytest.fixture
def reference(family: Path) -> ModelReference:
    loaded = load_target(str(family / "target"), Runtime(dtype="float64", compiled=False, device="cpu"))
    return ModelReference(loaded.lm)


@pytest.fixture(scope="module")
def ours(family: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Serving]:
    """Our own server, with a drafter."""
    runtime = Runtime(dtype="float64", compiled=False, device="cpu")
    engine: Engine = load(
        str(family / "target"), drafter="pard", draft=str(family / "pard"), k=4, runtime=runtime, lengths="fixed"
    )
    engine.target.tokenizer.chat_template = TEMPLATE
    with serving(engine, max_batch=4, max_queue=40) as found:
        yield found


Audit = Callable[..., ServedReport]


@pytest.fixture
def audited(tokenizer: PreTrainedTokenizerBase, reference: ModelReference) -> Audit:
    """Audits the server at an address."""

    def audit(
        url: str,
        model: str = MODEL,
        *,
        prompts: list[Any] = PROMPTS,
        samples: int = 0,
        tokens: int = 16,
        temperature: float = 1.0,
        beside: Reference = reference,
        **others: Any,
    ) -> ServedReport:
        others = {"draft": None, "draft_tokenizer": None, "reader": tokenizer} | others
        endpoint = AuditedServer(url=url, model=model, tokenizer=others.pop("reader"), end_ids=ENDS, rows=VOCAB + 8)
        return audit_endpoint(
            endpoint, beside, prompts, samples=samples, max_new_tokens=tokens, temperature=temperature, seed=0,
            report=lambda _: None, **others,
        )  # fmt: skip

    return audit


@pytest.fixture
def fake(
    target: Plain, tokenizer: PreTrainedTokenizerBase, models: Mapping[str, PreTrainedModel]
) -> Callable[..., FakeEngine]:
    """A fake engine that drafts, with settings of its loop."""

    def engine(telling: Telling | None = None, *, of: Plain = target, **settings: Any) -> FakeEngine:
        engines = {name: settings.pop(name) for name in ("read", "count", "tokenizer") if name in settings}
        decoding = Decoding(
            target=of, ends=ENDS, **{"propose": partial(pard, models["pard"], MASK, settings.pop("k", 4))} | settings
        )
        return FakeEngine(decoding=decoding, **{"tokenizer": tokenizer, "telling": telling or Telling()} | engines)

    return engine


ENOUGH = {"samples": 20, "tokens": 24}
"""What shows a distribution: up to 1,920 tokens."""


@pytest.mark.parametrize("prompts", [PROMPTS, CHAT])
def test_our_own_server_passes(ours: Serving, audited: Audit, prompts: list[Any]) -> None:
    """Guards against false alarms at a server that samples tokens only, where the output head has more rows."""
    report = audited(f"{ours.url}/v1", OURS, prompts=prompts, **ENOUGH)
    assert report.verdict == PASS, report.reason
    assert report.uniformity is not None and report.control is not None
    assert report.uniformity.tokens > 1500 and not report.control.is_uniform
    assert report.greedy_places == report.greedy_tokens > 40
    assert report.difference is not None and report.difference.largest < 1e-6


TELLING = {
    "ids": Telling(),
    "names": BY_NAME,
    "names, and no end": Telling(knows=(), tells_end=False),
    "at most 5 likeliest": Telling(most_likeliest=5),
    "one likeliest": Telling(most_likeliest=1),
    "ids as llama.cpp": Telling(knows=(), has_id_fields=True),
    "no ids of prompts": Telling(tells_prompt=False),
}


@pytest.mark.parametrize("telling", mostly_slow(TELLING, quick=["names", "one likeliest", "ids as llama.cpp"]))
def test_an_honest_server_passes_however_it_tells(fake: Any, audited: Audit, telling: str) -> None:
    """Guards servers of others: what they leave out, or call otherwise, is no fault."""
    shows_distribution = telling in ("ids", "names", "names, and no end")
    with fake(TELLING[telling]) as server:
        report = audited(server.url, **(ENOUGH if shows_distribution else {}))
    assert report.verdict == PASS, report.reason
    assert report.greedy_places == report.greedy_tokens


def test_logprobs_of_few_digits_are_no_fault(fake: Any, audited: Audit) -> None:
    """Guards servers that round what they tell: to two digits that is no fault, to one of them a fault could hide."""
    with fake(Telling(digits=2)) as server:
        report = audited(server.url)
    assert report.verdict == PASS, report.reason
    with fake(Telling(digits=1)) as server:
        report = audited(server.url)
    assert report.verdict == INCONCLUSIVE and "1 digits after the point" in report.reason


def accept_all(rows: Rows, drafted: list[int], draw: Draw) -> list[int]:
    """A fault: whatever is drafted is kept."""
    return [*drafted, draw(rows(len(drafted)))]


def typical(rows: Rows, drafted: list[int], draw: Draw) -> list[int]:
    """A fault: what the target finds likely enough is kept (Medusa's typical acceptance)."""
    for place, token in enumerate(drafted):
        shares = rows(place).double().softmax(0)
        entropy = -float((shares * shares.clamp(min=1e-12).log()).sum())
        if float(shares[token]) <= min(0.09, 0.3 * 2.718**-entropy):
            return [*drafted[:place], draw(rows(place))]
    return [*drafted, draw(rows(len(drafted)))]


def kept_by_chance(rows: Rows, drafted: list[int], draw: Draw) -> list[int]:
    """A fault: a token that was rejected may be drawn again, where the residual distribution belongs."""
    for place, token in enumerate(drafted):
        if draw(rows(place)) != token:
            return [*drafted[:place], draw(rows(place))]
    return [*drafted, draw(rows(len(drafted)))]


def bonus_of_draft(rows: Rows, drafted: list[int], draw: Draw) -> list[int]:
    """A fault: after drafts that are all kept, the draft's own next token stands where the target's belongs."""
    made = lossless(rows, drafted[:-1], draw)
    return [*made[:-1], drafted[-1]] if drafted and len(made) == len(drafted) else made


GREEDY_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "all drafts are kept": ({"rule": accept_all}, "tokens that are not the likeliest"),
    "likely drafts are kept": ({"rule": typical}, "tokens that are not the likeliest"),
    "a bonus token of the draft": ({"rule": bonus_of_draft, "k": 2}, "tokens that are not the likeliest"),
    "all drafts are kept from token 12 on": (
        {"rule": accept_all, "from_place": 12},
        "the server itself, by what it tells, prefers another",
    ),
    "it samples although it is asked for the likeliest": (
        {"warmth": lambda temperature: 1.0},
        "tokens that are not the likeliest",
    ),
}


@pytest.mark.parametrize("fault", GREEDY_FAULTS)
def test_lossy_servers_fail_greedily(fake: Any, audited: Audit, fault: str) -> None:
    """Guards the word PASS: controls that must be caught."""
    settings, words = GREEDY_FAULTS[fault]
    with fake(**settings) as server:
        report = audited(server.url)
    assert report.verdict == FAIL and words in report.reason, report.reason
    assert any(not each.is_tie for each in report.preferences)
    assert "NOT explained by rounding" in "\n".join(findings(report, tiny_tokenizer()))


SAMPLING_FAULTS: dict[str, dict[str, Any]] = {
    "a lower temperature": {"warmth": lambda temperature: 0.6 * temperature},
    "greedily": {"warmth": lambda temperature: 0.0},
    "rejected tokens again": {"rule": kept_by_chance},
}


@pytest.mark.parametrize("fault", mostly_slow(SAMPLING_FAULTS, quick=["rejected tokens again"]))
def test_lossy_servers_fail_where_they_sample(fake: Any, audited: Audit, fault: str) -> None:
    """Guards the word PASS for servers that are right greedily: vLLM's on CPUs was one."""
    with fake(**SAMPLING_FAULTS[fault]) as server:
        report = audited(server.url, **ENOUGH)
    assert report.verdict == FAIL, report.reason
    assert "greedy answers are the model's, sampled ones are not" in report.reason
    assert "(false alarms: 1e-06)" in report.reason and not report.preferences


def test_too_few_samples_show_nothing(fake: Any, audited: Audit) -> None:
    """Guards against a PASS that nothing could have failed."""
    with fake() as server:
        report = audited(server.url, samples=1)
    assert report.verdict == INCONCLUSIVE and "ask for more samples or tokens" in report.reason
    assert report.control is not None and report.control.is_uniform


def test_other_weights_fail(fake: Any, audited: Audit, models: Mapping[str, PreTrainedModel]) -> None:
    """Guards against a server of another model, such as a quantized one."""
    with fake(of=Plain(models["draft"])) as server:
        report = audited(server.url)
    assert report.verdict == FAIL and "is it the same model, in the same precision" in report.reason


@pytest.mark.parametrize(
    "lie", [lambda token, logprob: 1.1 * logprob, lambda token, logprob: logprob - 0.5 * (token == 7)]
)
def test_logprobs_that_lie_fail(fake: Any, audited: Audit, lie: Callable[[int, float], float]) -> None:
    """Guards against ties that are excused by what the server tells."""
    with fake(Telling(lie=lie)) as server:
        report = audited(server.url, samples=4)
    assert report.verdict == FAIL and "the probabilities that the server tells are not those" in report.reason


def test_faults_that_need_a_batch_are_caught(
    target: Plain, tokenizer: PreTrainedTokenizerBase, models: Mapping[str, PreTrainedModel], audited: Audit
) -> None:
    """Guards against an audit that asks one prompt at a time: where drafts are looked at, it asks together as well."""
    alone = Decoding(target=target, ends=ENDS, propose=partial(pard, models["pard"], MASK, 4))
    draft = DraftModel(model=models["pard"], k=4, mask_id=MASK, known_ids=VOCAB)
    for looks_at_drafts in (None, draft):
        with FakeEngine(
            decoding=alone, tokenizer=tokenizer, when_together=replace(alone, rule=accept_all), delay_s=0.02
        ) as server:
            report = audited(server.url, draft=looks_at_drafts)
        assert report.verdict == FAIL and "tokens that are not the likeliest" in report.reason


def test_ties_pass_and_are_listed(
    models: Mapping[str, PreTrainedModel], fake: Any, audited: Audit, reference: ModelReference, target: Plain
) -> None:
    """Guards honest servers whose rounding decides between two tokens that are as likely."""
    answer = [token for new, _, _ in Decoding(target=target, ends=ENDS).rounds([1], 16, 0.0, 0) for token in new]
    often, other = max(set(answer), key=answer.count), 40
    models = {"reference": reference.lm.model, "server": copy.deepcopy(models["target"])}
    with torch.no_grad():
        for name, model in models.items():
            rows = model.get_input_embeddings().weight
            rows[other] = rows[often] * (1 - 1e-8 if name == "reference" else 1 + 1e-8)
    with fake(of=Plain(models["server"])) as server:
        report = audited(server.url, prompts=["a"])
    assert report.verdict == TIES, report.reason
    assert "in 1 of 1 answers up to near-ties" in report.reason
    assert all(each.is_tie and each.margin < 1e-5 for each in report.preferences)
    assert "a near-tie" in "\n".join(findings(report, tiny_tokenizer()))


@pytest.mark.slow
def test_another_server_as_the_reference(fake: Any, audited: Audit, ours: Serving, tokenizer: Any) -> None:
    """Guards the audit of models that do not fit here; the reference tells twenty tokens of each place, or five."""
    for telling, samples in ((Telling(), 16), (Telling(most_likeliest=5), 0), (BY_NAME, 0)):
        with fake() as server, fake(telling) as other:
            beside = ServerReference(
                endpoint=AuditedServer(url=other.url, model=MODEL, tokenizer=tokenizer, end_ids=ENDS, rows=VOCAB + 8)
            )
            report = audited(server.url, beside=beside, samples=samples, tokens=24)
        assert report.verdict == PASS, report.reason
        assert report.reference == "the reference server"
        # Of ids that are no token a name says nothing.
        assert report.greedy_places >= (0.8 if telling is BY_NAME else 1.0) * report.greedy_tokens
    url = f"{ours.url}/v1"
    beside = ServerReference(endpoint=AuditedServer(url=url, model=OURS, tokenizer=tokenizer, end_ids=ENDS))
    report = audited(url, OURS, beside=beside)
    assert report.verdict == PASS, report.reason


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"rule": accept_all}, "tokens that are not the likeliest"),
        ({"warmth": lambda temperature: 0.0}, "sampled ones are not"),
    ],
)
def test_lossy_servers_fail_beside_another_server(
    fake: Any, audited: Audit, tokenizer: Any, fault: dict[str, Any], words: str
) -> None:
    """Guards the word PASS where the reference tells only the likeliest tokens."""
    with fake(**fault) as server, fake() as other:
        endpoint = AuditedServer(url=other.url, model=MODEL, tokenizer=tokenizer, end_ids=ENDS, rows=VOCAB + 8)
        samples = 0 if "rule" in fault else 20
        report = audited(server.url, beside=ServerReference(endpoint=endpoint), samples=samples, tokens=24)
    assert report.verdict == FAIL and words in report.reason, report.reason


def test_a_reference_that_tells_no_likeliest_is_refused(fake: Any, audited: Audit, tokenizer: Any) -> None:
    """Guards against a PASS beside a server that says nothing of other tokens than its own."""
    with fake(rule=accept_all) as server, fake(Telling(most_likeliest=1)) as other:
        beside = ServerReference(endpoint=AuditedServer(url=other.url, model=MODEL, tokenizer=tokenizer, end_ids=ENDS))
        with pytest.raises(ValueError, match="tells no likeliest tokens beside its own"):
            audited(server.url, beside=beside)
