"""Audits a server: asks it, checks its prompts and its drafting, and has its answers judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from paradraft.audit.server.counters import Counters, counters_of, fault_of_counters
from paradraft.audit.server.draft_causes import DraftComparison, compare, rounds_of
from paradraft.audit.server.endpoint import AuditedServer, Served, ServerPrompt
from paradraft.audit.server.findings import Read
from paradraft.audit.server.prompt_causes import expected_ids, fault_of_prompt, fault_that_fits
from paradraft.audit.server.rounds import AuditedDraft
from paradraft.audit.server.served import ServedReport, fits, judge
from paradraft.audit.server.tables import Reference
from paradraft.text.chat_template import Message


def audit_endpoint(
    endpoint: AuditedServer,
    reference: Reference,
    prompts: Sequence[str | list[Message]],
    *,
    samples: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    draft: AuditedDraft | None,
    draft_tokenizer: PreTrainedTokenizerBase | None,
    report: Callable[[str], None],
) -> ServedReport:
    """Audits a server.

    Args:
        reference: the model or server whose answers it must give.
        prompts: texts to continue, and conversations to answer.
        samples: sampled answers per prompt, beside the greedy one.
        temperature: of the sampled answers.
        seed: of the first sampled answer; each has the next.
        draft: what the server should draft with; None skips the check of its drafts.

    Raises:
        ValueError: the server or the reference does not answer, or not as it must for an audit.
    """
    read_by_model = [expected_ids(prompt, endpoint.tokenizer) for prompt in prompts]
    questions = [
        ServerPrompt(number=number, prompt=prompt, max_new_tokens=max_new_tokens)
        for number, prompt in enumerate(prompts, start=1)
    ]
    before = counters_of(endpoint)
    # One at a time where rounds are compared: chunks that wait for each other are sent together.
    greedy = alone = endpoint.answers(
        questions,
        lambda done: report(f"greedy answers: {done} of {len(questions)}"),
        **({} if draft is None else {"concurrency": 1}),
    )
    after = counters_of(endpoint)
    if draft is not None:  # and together, for some faults need a batch; equal answers show nothing more
        again = endpoint.answers(questions, lambda done: report(f"the same together: {done} of {len(questions)}"))
        greedy = [*alone, *(new for new, old in zip(again, alone, strict=True) if new.tokens != old.tokens)]
    chances = [
        replace(each, temperature=temperature, seed=seed + sample * len(prompts) + each.number - 1)
        for sample in range(samples)
        for each in questions
    ]
    sampled = endpoint.answers(chances, lambda done: report(f"sampled answers: {done} of {len(chances)}"))
    answers = _known(greedy, read_by_model)
    if not answers:
        raise ValueError(f"endpoint {endpoint.url} answers nothing that could be compared: every answer is empty")
    fault = _fault(answers, greedy, endpoint, reference, prompts, draft_tokenizer, report)
    drafting = None if draft is None else _drafting(_known(alone, read_by_model), draft, (before, after), report)
    is_named = any(served.is_named for served in (*greedy, *sampled))
    groups = [group for group in (endpoint.end_ids, endpoint.ambiguous if is_named else ()) if group]
    return judge(
        answers, _known(sampled, read_by_model), reference, groups=groups, temperature=temperature, prompts=fault,
        drafting=drafting, report=report,
    )  # fmt: skip


def _known(answers: Sequence[Served], read_by_model: Sequence[list[int]]) -> list[Read]:
    """Answers that have tokens, with the prompts that were read: those that the server tells, or the model's."""
    return [
        Read(served=served, prompt=served.read or read_by_model[served.question.number - 1])
        for served in answers
        if served.tokens
    ]


def _fault(
    answers: Sequence[Read],
    greedy: Sequence[Served],
    endpoint: AuditedServer,
    reference: Reference,
    prompts: Sequence[str | list[Message]],
    draft_tokenizer: PreTrainedTokenizerBase | None,
    report: Callable[[str], None],
) -> str | None:
    """The likely fault of the prompts that the server has read; None if there is none."""
    longest = max(answers, key=lambda read: len(read.served.tokens)).served
    if longest.read is None:
        report("reading the prompts in other ways")
        likely = fault_that_fits(
            longest, prompts[longest.question.number - 1], endpoint.tokenizer, draft_tokenizer,
            lambda ids: fits(Read(served=longest, prompt=ids), reference),
        )  # fmt: skip
        if likely is not None:
            return likely
    faults = (
        fault_of_prompt(served, prompts[served.question.number - 1], endpoint.tokenizer, draft_tokenizer)
        for served in greedy
    )
    return next((fault for fault in faults if fault is not None), None)


def _drafting(
    greedy: Sequence[Read],
    draft: AuditedDraft,
    counters: tuple[Counters | None, Counters | None],
    report: Callable[[str], None],
) -> DraftComparison:
    rounds = [each for read in greedy for each in rounds_of(read.served, read.prompt)]
    if not rounds:
        raise ValueError("the answers are too short to have rounds that could be compared: ask for more tokens")
    drafting = compare(rounds, draft, report)
    note = fault_of_counters(*counters, [read.served for read in greedy], draft.k)
    return drafting if note is None else drafting.with_note(note)
