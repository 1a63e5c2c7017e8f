"""Prompts that a server reads otherwise: each way is planted in a fake engine, and named by the audit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from paradraft.audit.server.endpoint import AuditedServer
from paradraft.audit.server.endpoint_audit import audit_endpoint
from paradraft.audit.server.served import ServedReport
from paradraft.audit.server.tables import ModelReference
from paradraft.audit.verdict import FAIL, PASS
from paradraft.models.runtime import Runtime
from paradraft.sources.target_loading import load_target
from tests.conftest import VOCAB, tiny_tokenizer
from tests.support.fake_engine import MODEL, Decoding, FakeEngine, Plain, Telling

END, BOS = 0, VOCAB
PROMPTS = ["helloworld", "xyz"]
CHAT = [[{"role": "user", "content": text}] for text in PROMPTS]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role[0] }}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking is not defined or enable_thinking %}T{% else %}N{% endif %}"
    "{% endif %}"
)
Reads = Callable[[dict[str, Any], PreTrainedTokenizerBase], list[int]]


def with_bos(template: str = TEMPLATE) -> PreTrainedTokenizerBase:
    """Puts a token before every text, as Llama's does."""
    found = tiny_tokenizer()
    found.add_special_tokens({"bos_token": AddedToken("<s>", special=True)})
    found.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    found.chat_template = template
    return found


@pytest.fixture(scope="module")
def audited(family: Path) -> Callable[..., ServedReport]:
    """Audits a fake engine that reads prompts in some way."""
    torch.set_num_threads(1)
    tokenizer = with_bos()
    target = Plain(AutoModelForCausalLM.from_pretrained(family / "target", dtype=torch.float64))
    runtime = Runtime(dtype="float64", compiled=False, device="cpu")
    reference = ModelReference(load_target(str(family / "target"), runtime).lm)

    def audit(read: Reads | None, prompts: list[Any], telling: Telling, draft: Any = None) -> ServedReport:
        server = FakeEngine(
            decoding=Decoding(target=target, ends=frozenset({END})), tokenizer=tokenizer, telling=telling,
            read=None if read is None else lambda body: read(body, tokenizer),
        )  # fmt: skip
        with server:
            endpoint = AuditedServer(
                url=server.url, model=MODEL, tokenizer=tokenizer, end_ids=frozenset({END}), rows=VOCAB + 8
            )
            return audit_endpoint(
                endpoint, reference, prompts, samples=0, max_new_tokens=12, temperature=1.0, seed=0, draft=None,
                draft_tokenizer=draft, report=lambda _: None,
            )  # fmt: skip

    return audit


def written(body: dict[str, Any], tokenizer: PreTrainedTokenizerBase, **variables: Any) -> list[int]:
    variables = {"add_generation_prompt": True} | variables
    return list(tokenizer.apply_chat_template(body["messages"], return_dict=True, **variables)["input_ids"])


def plain(body: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return list(tokenizer(body["prompt"])["input_ids"])


TEXT_FAULTS: dict[str, tuple[Reads, str]] = {
    "doubled BOS": (lambda body, t: [BOS, *plain(body, t)], "stands there twice"),
    "missing BOS": (lambda body, t: plain(body, t)[1:], "beginning-of-text token is missing"),
    "an end": (lambda body, t: [*plain(body, t), END], "an end-of-text token stands after the prompt"),
    "a template": (
        lambda body, t: written({"messages": [{"role": "user", "content": body["prompt"]}]}, t),
        "the chat template is put around a plain text",
    ),
}
CHAT_FAULTS: dict[str, tuple[Reads, str]] = {
    "doubled BOS": (lambda body, t: [BOS, *written(body, t)], "stands there twice"),
    "missing BOS": (lambda body, t: written(body, t)[1:], "beginning-of-text token is missing"),
    "thinking": (lambda body, t: written(body, t, enable_thinking=False), "enable_thinking is False"),
    "a system message": (
        lambda body, t: written({"messages": [{"role": "system", "content": ""}, *body["messages"]]}, t),
        "a system message is put before it",
    ),
    "no template": (lambda body, t: list(t(body["messages"][0]["content"])["input_ids"]), "no chat template is used"),
    "no turn": (lambda body, t: written(body, t, add_generation_prompt=False), "add_generation_prompt"),
    "the draft's template": (
        lambda body, t: written(body, with_bos("{{ bos_token }}D{{ messages[0].content }}D")),
        "the draft's chat template is used",
    ),
}
ALL = [(PROMPTS, *fault) for fault in TEXT_FAULTS.values()] + [(CHAT, *fault) for fault in CHAT_FAULTS.values()]
TELLING = {
    "ids": Telling(),
    "counts": Telling(tells_prompt=False),
    "nothing": Telling(tells_prompt=False, counts_prompt=False),
}


@pytest.mark.parametrize("telling", TELLING)
@pytest.mark.parametrize(
    ("prompts", "read", "words"), ALL, ids=[*TEXT_FAULTS, *(f"chat: {key}" for key in CHAT_FAULTS)]
)
def test_prompts_that_are_read_otherwise_are_named(
    audited: Callable[..., ServedReport], telling: str, prompts: list[Any], read: Reads, words: str
) -> None:
    """Guards the names of the faults, for servers that tell ids, only how many, or nothing: the answers show it too."""
    draft = with_bos("{{ bos_token }}D{{ messages[0].content }}D")
    report = audited(read, prompts, TELLING[telling], draft)
    assert report.verdict == FAIL and "the server reads other prompts than were asked" in report.reason
    assert report.prompts is not None and words in report.prompts


@pytest.mark.parametrize("telling", TELLING)
@pytest.mark.parametrize("prompts", [PROMPTS, CHAT])
def test_prompts_that_are_read_as_they_are_pass(
    audited: Callable[..., ServedReport], telling: str, prompts: list[Any]
) -> None:
    """Guards against false alarms."""
    report = audited(None, prompts, TELLING[telling])
    assert report.verdict == PASS and report.prompts is None, report.reason


def test_another_prompt_that_nobody_knows_is_shown(audited: Callable[..., ServedReport]) -> None:
    """Guards the words for all other ways: where the prompts part is shown, or how many tokens there are."""
    read: Reads = lambda body, t: [*plain(body, t)[:3], 5, 5, 5]  # noqa: E731  # as all of them here
    by_ids, by_counts = (audited(read, PROMPTS, TELLING[name]).prompts for name in ("ids", "counts"))
    assert by_ids is not None and "it reads 6 tokens, not 11, and from token 3 on 'eee', not 'lloworld'" in by_ids
    assert by_counts is not None and "it reads 6 tokens of prompt 1, not 11" in by_counts
