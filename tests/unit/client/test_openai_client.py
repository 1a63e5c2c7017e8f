"""The HTTP client by itself; the tests of `data` and `audit` that are called `test_endpoint.py` run it on servers."""

from __future__ import annotations

import time
from email.utils import formatdate

import httpx2

from paradraft.client.openai_client import retry_after_s


def test_retry_after_in_all_its_forms() -> None:
    """Guards against a date, which HTTP allows there, and against nonsense that would stop the run."""

    def seconds(value: str) -> float:
        return retry_after_s(httpx2.Response(429, headers={"Retry-After": value}))

    assert 98 < seconds(formatdate(time.time() + 100, usegmt=True)) <= 100
    nothing = ["0", "-3", "nan", "", "soon", "Sun, 06 Nov 1994 08:49:37 GMT"]
    assert [seconds(value) for value in ["2", *nothing]] == [2] + [0] * len(nothing)
    assert retry_after_s(httpx2.Response(429)) == 0
