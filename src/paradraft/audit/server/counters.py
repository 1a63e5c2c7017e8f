"""Reads a server's counters of drafts, and compares them with what its answers show.

The counters are vLLM's, and those of servers that use its names: drafts, and drafted tokens that were accepted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from paradraft.audit.server.endpoint import AuditedServer, Served
from paradraft.client.openai_client import CONNECT_S

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? ([0-9.eE+-]+)", re.MULTILINE)
APART = 0.4
"""Allowed difference in accepted tokens per draft; it would be 1 if a token were counted twice or not at all."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Totals since the server started; `accepted` are drafted tokens."""

    drafts: float
    accepted: float


def counters_of(endpoint: AuditedServer) -> Counters | None:
    """The counters of a server; None if it has none, or does not publish them."""
    root = re.sub(r"/v\d+/?$", "", endpoint.url)
    try:
        response = httpx2.get(f"{root}/metrics", timeout=CONNECT_S)
    except httpx2.HTTPError:
        return None
    return None if response.status_code != 200 else read(response.text)


def read(text: str) -> Counters | None:
    """Counters from a page of Prometheus' text format; None if they are missing.

    >>> read(f'{DRAFTS}{{engine="0"}} 3.0\\n{DRAFTS}{{engine="1"}} 1.0\\n{ACCEPTED} 9.0\\n')
    Counters(drafts=4.0, accepted=9.0)
    """
    totals = {DRAFTS: 0.0, ACCEPTED: 0.0}
    names = set()
    for name, value in _SAMPLE.findall(text):
        if name in totals:
            totals[name] += float(value)
            names.add(name)
    return Counters(drafts=totals[DRAFTS], accepted=totals[ACCEPTED]) if len(names) == len(totals) else None


def fault_of_counters(before: Counters | None, after: Counters | None, answers: Sequence[Served], k: int) -> str | None:
    """A sentence if counters and the answers between them disagree; None if not, or if it cannot be decided."""
    if before is None or after is None:
        return None
    drafts, accepted = after.drafts - before.drafts, after.accepted - before.accepted
    sizes = [size for served in answers for size in served.steps[1:]]
    if drafts <= 0 or not sizes or drafts > 2 * len(sizes) + len(answers):  # it has answered others too
        return None
    counted, seen = accepted / drafts, sum(sizes) / len(sizes) - 1
    # Of the last draft of each answer some accepted tokens are beyond its end.
    slack = APART + k * len(answers) / (2 * len(sizes))
    if abs(counted - seen) <= slack:
        return None
    where = "with the target's own token" if abs(counted - 1 - seen) <= slack else "of other tokens"
    return f"Its metrics count {counted:.2f} accepted tokens a draft ({where}), its answers show {seen:.2f}."
