"""What a server counts of its drafts, beside what its answers show.

vLLM's counters, and those of servers that use its names: drafts, and drafted tokens that were accepted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import httpx2

from paradraft.audit.server.endpoint import Endpoint, Served
from paradraft.data.endpoint import CONNECT_S

DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? ([0-9.eE+-]+)", re.MULTILINE)
APART = 0.4
"""Of accepted tokens a draft, between what is counted and what is seen, before it is a fault: a token that is counted
twice or not at all is one."""


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Since the server has begun.

    Args:
        drafts: how many.
        accepted: drafted tokens that were accepted.
    """

    drafts: float
    accepted: float


def counters_of(endpoint: Endpoint) -> Counters | None:
    """The counters of a server; None if it has none, or does not show them."""
    root = re.sub(r"/v\d+/?$", "", endpoint.url)
    try:
        response = httpx2.get(f"{root}/metrics", timeout=CONNECT_S)
    except httpx2.HTTPError:
        return None
    return None if response.status_code != 200 else read(response.text)


def read(text: str) -> Counters | None:
    """The counters in a page of Prometheus' text format; None if they are not there.

    >>> read(f'{DRAFTS}{{engine="0"}} 3.0\\n{DRAFTS}{{engine="1"}} 1.0\\n{ACCEPTED} 9.0\\n')
    Counters(drafts=4.0, accepted=9.0)
    """
    found = {DRAFTS: 0.0, ACCEPTED: 0.0}
    names = set()
    for name, value in _SAMPLE.findall(text):
        if name in found:
            found[name] += float(value)
            names.add(name)
    return Counters(drafts=found[DRAFTS], accepted=found[ACCEPTED]) if len(names) == len(found) else None


def fault_of_counters(before: Counters | None, after: Counters | None, answers: Sequence[Served], k: int) -> str | None:
    """What is wrong with what was counted between two times, a sentence; None if nothing is, or it cannot be told.

    Args:
        before: the counters before the answers.
        after: those after them.
        answers: all that the server has answered between.
        k: tokens drafted per round.
    """
    if before is None or after is None:
        return None
    drafts, accepted = after.drafts - before.drafts, after.accepted - before.accepted
    sizes = [size for served in answers for size in served.steps[1:]]
    if drafts <= 0 or not sizes or drafts > 2 * len(sizes) + len(answers):  # others have asked it too
        return None
    told, seen = accepted / drafts, sum(sizes) / len(sizes) - 1
    # Of the last draft of each answer some accepted tokens are beyond its end.
    slack = APART + k * len(answers) / (2 * len(sizes))
    if abs(told - seen) <= slack:
        return None
    where = "with the target's own token" if abs(told - 1 - seen) <= slack else "of other tokens"
    return f"Its metrics count {told:.2f} accepted tokens a draft ({where}), its answers show {seen:.2f}."
