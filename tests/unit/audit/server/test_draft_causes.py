"""How a server drafts: faults that users of engines have met, each planted in a fake engine and named by the audit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from paradraft.audit.server.draft_causes import DraftComparison
from paradraft.audit.server.draft_passes import DraftModel, _faults_of_config, _rebuilt
from paradraft.audit.server.endpoint import AuditedServer
from paradraft.audit.server.endpoint_audit import audit_endpoint
from paradraft.audit.server.served import ServedReport
from paradraft.audit.server.tables import ModelReference, Table
from paradraft.audit.verdict import FAIL, PASS
from paradraft.data.prompts import read_prompts
from paradraft.formats.pard import RANK
from paradraft.models.runtime import Runtime
from paradraft.sources.loading import load_tokenizer, pocket_folder
from paradraft.sources.target_loading import load_target
from tests.conftest import VOCAB
from tests.support.fake_engine import MODEL, Decoding, FakeEngine, Plain, Propose, one_by_one, pard
from tests.support.kinds import KINDS, model_of
from tests.support.kinds import WINDOW as WINDOW_OF_KINDS
from tests.support.quick import mostly_slow

K, MASK, KNOWN = 4, 4088, 4088
"""Of the pocket family: its mask token is the first row that is no token."""
ENDS = frozenset({0})
WINDOW = 4


class Remembering(ModelReference):
    """The model's own pass, once for each text of all tests."""

    known: dict[tuple[int, ...], Table]

    def table(self, prompt: list[int], tokens: list[int], logprobs: Sequence[float | None]) -> Table:
        key = (*prompt, -1, *tokens)
        if key not in self.known:
            self.known[key] = super().table(prompt, tokens, logprobs)
        return self.known[key]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Passes of so few tokens take longer with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(str(pocket_folder("target")))


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [str(record["prompt"])[:24] for record in read_prompts(pocket_folder("prompts.jsonl"))[:4]]


@pytest.fixture(scope="module")
def target() -> Plain:
    return Plain(AutoModelForCausalLM.from_pretrained(pocket_folder("target"), dtype=torch.float32))


@pytest.fixture(scope="module")
def reference() -> Remembering:
    loaded = load_target(str(pocket_folder("target")), Runtime(dtype="float32", compiled=False, device="cpu"))
    found = Remembering(loaded.lm)
    found.known = {}
    return found


def draft_model(**changes: Any) -> PreTrainedModel:
    """The pocket draft as `paradraft export` writes it, without its head, with another config and the same weights."""
    loaded = AutoModelForCausalLM.from_pretrained(pocket_folder("pard"), dtype=torch.float32).eval()
    return rebuilt(loaded, **changes)


def rebuilt(model: PreTrainedModel, **changes: Any) -> PreTrainedModel:
    config = copy.deepcopy(model.config)
    delattr(config, RANK) if hasattr(config, RANK) else None
    for key, value in changes.items():
        setattr(config, key, value)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    own = made.state_dict()
    made.load_state_dict({key: value for key, value in model.state_dict().items() if key in own})
    return made.eval()


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return draft_model()


Audit = Callable[..., ServedReport]


@pytest.fixture(scope="module")
def audited(tokenizer: PreTrainedTokenizerBase, prompts: list[str], target: Plain, reference: Remembering) -> Audit:
    """Audits a fake engine that drafts in some way, beside a draft model."""

    def audit(
        propose: Propose, draft: PreTrainedModel, *, asked: list[str] | None = None, rows: int | None = None,
        tokens: int = 22, **engine: Any,
    ) -> ServedReport:  # fmt: skip
        drafts = cache(lambda text, prompt: propose([*text], prompt))  # all prompts are asked twice
        decoding = Decoding(target=target, ends=ENDS, propose=lambda text, prompt: drafts(tuple(text), prompt))
        with FakeEngine(decoding=decoding, tokenizer=tokenizer, **engine) as server:
            return audit_endpoint(
                AuditedServer(url=server.url, model=MODEL, tokenizer=tokenizer, end_ids=ENDS), reference,
                asked or prompts, samples=0, max_new_tokens=tokens, temperature=1.0, seed=0,
                draft=DraftModel(model=draft, k=K, mask_id=MASK, known_ids=KNOWN, special=(0,), training_rows=rows),
                draft_tokenizer=tokenizer, report=lambda _: None,
            )  # fmt: skip

    return audit


def drafting_of(report: ServedReport) -> DraftComparison:
    assert report.drafting is not None
    return report.drafting


def named(report: ServedReport, *words: str) -> None:
    """It fails, for no other reason than the drafts, and says why."""
    found = drafting_of(report)
    assert report.verdict == FAIL and found.cause is not None and found.cause in report.reason
    assert not report.preferences
    assert all(word in found.cause for word in words), found.cause
    assert "none of the faults" not in found.cause


def test_an_honest_engine_drafts_as_the_draft_does_here(audited: Audit, draft: PreTrainedModel) -> None:
    """Guards against false alarms, and against a comparison of nothing."""
    report = audited(partial(pard, draft, MASK, K), draft)
    found = drafting_of(report)
    assert report.verdict == PASS
    assert found.cause is None and found.equal == 1.0 and not found.notes
    assert found.rounds > 20 and found.length > 2.0
    assert found.by_position == found.expected_by_position


FAULTS: dict[str, tuple[Callable[[PreTrainedModel], Propose], tuple[str, ...]]] = {
    "one token a pass": (lambda draft: partial(one_by_one, draft, K), ("parallel_drafting",)),
    "an end as mask": (lambda draft: partial(pard, draft, 0, K), ("wrong mask", "token is 0, not 4088")),
    "the token before the mask": (lambda draft: partial(pard, draft, MASK - 1, K), ("wrong mask", "is 4087")),
    "masks at one position": (lambda draft: partial(pard, draft, MASK, K, same=True), ("do not advance",)),
    "a row too early": (lambda draft: partial(pard, draft, MASK, K, shift=-1), ("shift by one", "early")),
    "a row too late": (lambda draft: partial(pard, draft, MASK, K, shift=1), ("shift by one", "late")),
    "the prompt is not read": (
        lambda draft: lambda text, prompt: pard(draft, MASK, K, text[prompt:], 0),
        ("prompt unread",),
    ),
    "another rope": (
        lambda draft: partial(
            pard, rebuilt(draft, rope_parameters={"rope_type": "default", "rope_theta": 1e6}), MASK, K
        ),
        ("wrong rope", "rope_theta=1e+06"),
    ),
    "the last layer is not run": (
        lambda draft: partial(pard, rebuilt(draft, num_hidden_layers=3, layer_types=["full_attention"] * 3), MASK, K),
        ("layer off by one", "last"),
    ),
    "weights that are noise": (lambda draft: lambda text, prompt: [1, 1, 1, 1], ("ever accepted", "quantized")),
    "half as many": (lambda draft: partial(pard, draft, MASK, 2), ("drafts 2 tokens a round, not 4",)),
}


@pytest.mark.parametrize("fault", mostly_slow(FAULTS, quick=["an end as mask", "a row too late", "another rope"]))
def test_faults_are_named(audited: Audit, draft: PreTrainedModel, fault: str) -> None:
    """Guards the names of the faults that users have met: each must be told from all others."""
    plant, words = FAULTS[fault]
    named(audited(plant(draft), draft), *words)


@pytest.mark.slow
def test_sliding_windows_that_run_as_full_attention_are_named(audited: Audit) -> None:
    """Guards drafts with sliding windows, which such an engine drafts well with up to the window, and then not."""
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    draft = draft_model(layer_types=kinds, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)
    honest = audited(partial(pard, draft, MASK, K), draft)
    assert drafting_of(honest).cause is None and drafting_of(honest).equal == 1.0
    full = rebuilt(draft, layer_types=["full_attention"] * 4, sliding_window=None, use_sliding_window=False)
    named(audited(partial(pard, full, MASK, K), draft), "sliding window")


@pytest.mark.slow
def test_rows_that_are_no_token_are_named(audited: Audit) -> None:
    """Guards embeddings that were filled up at random: an engine drafts ids that no text has."""
    draft = draft_model()
    rows = draft.get_input_embeddings().weight
    with torch.no_grad():
        rows[MASK + 1 :] = 4 * rows[:KNOWN].std() * torch.randn(len(rows) - MASK - 1, rows.shape[1])
    named(audited(partial(pard, draft, MASK, K), draft), "random rows", "paradraft export")


def test_a_scaled_rope_that_is_not_scaled_is_named(audited: Audit, draft: PreTrainedModel) -> None:
    """Guards drafts of long texts, whose scaling an engine does not read."""
    scaled = rebuilt(draft, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0})
    named(audited(partial(pard, draft, MASK, K), scaled), "wrong rope", "rope_theta=10000 and no scaling")


def test_a_quantized_draft_is_told_to_be_one(audited: Audit, draft: PreTrainedModel) -> None:
    """Guards the words for a quantized draft whose acceptance is silently 0."""
    quantized = copy.copy(draft)
    quantized.config = copy.deepcopy(draft.config)
    quantized.config.quantization_config = {"quant_method": "none that an engine knows"}
    named(audited(lambda text, prompt: [1] * K, quantized), "whose quantization it does not read")


def test_a_fault_that_nobody_knows_is_no_other(audited: Audit, draft: PreTrainedModel) -> None:
    """Guards against a name for what is none of the known faults: here every second draft is noise."""

    def odd(text: list[int], prompt: int) -> list[int]:
        return pard(draft, MASK, K, text, prompt) if len(text) % 2 else [1] * K

    report = audited(odd, draft)
    cause = drafting_of(report).cause
    assert report.verdict == FAIL
    assert cause is not None and "none of the faults that are known explains it" in cause


@pytest.mark.slow
def test_texts_beyond_the_training_rows_are_noted(audited: Audit, draft: PreTrainedModel, prompts: list[str]) -> None:
    """Guards users whose prompts are longer than what the draft was trained on: it drafts there, and worse."""
    far = copy.deepcopy(draft)
    limit = 28

    def untrained(module: Any, given: Any, named: Any, out: Any) -> Any:
        logits: Tensor = out.logits
        is_far = named["position_ids"][:, -logits.shape[1] :] >= limit
        logits[is_far] = logits[is_far].roll(1, -1)
        return out

    far.register_forward_hook(untrained, with_kwargs=True)
    report = audited(partial(pard, far, MASK, K), far, rows=limit, tokens=40)
    found = drafting_of(report)
    assert report.verdict == PASS and found.cause is None
    assert len(found.notes) == 1 and f"longer than the {limit} tokens of the rows" in found.notes[0]
    assert not drafting_of(audited(partial(pard, draft, MASK, K), draft, rows=limit, tokens=40)).notes


@pytest.mark.parametrize(("count", "words"), [(len, "with the target's own token"), (lambda new: 0, "of other tokens")])
def test_metrics_that_count_other_tokens_are_noted(
    audited: Audit, draft: PreTrainedModel, count: Callable[[list[int]], int], words: str
) -> None:
    """Guards acceptance that is counted on the wrong token: it looks better or worse than it is."""
    found = drafting_of(audited(partial(pard, draft, MASK, K), draft, count=count))
    assert found.cause is None and len(found.notes) == 1 and words in found.notes[0]


@pytest.mark.parametrize("kind", KINDS)
def test_faults_are_tried_on_every_architecture(kind: str) -> None:
    """Guards drafts of all kinds against tracebacks, and against faults that are none: another config must change what
    the model says, and the same config nothing."""
    model = model_of(kind)
    text = torch.randint(VOCAB, (1, 2 * WINDOW_OF_KINDS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        own = model(text).logits
        with _rebuilt(model, {"use_cache": False}) as same:
            assert torch.equal(same(text).logits, own)
        changes = dict(_faults_of_config(model.config))
        for change in changes.values():
            with _rebuilt(model, change) as other:
                assert not torch.allclose(other(text).logits, own)
    assert len(changes) >= 3
    assert any("sliding window" in name for name in changes) == (kind.endswith("with windows") or kind == "ministral")
