"""A `paradraft serve` process with a real model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import httpx2
import pytest

from paradraft.engine.loader import load
from paradraft.sampling_params import GREEDY, Sampling
from tests.real.conftest import QUESTIONS, SMOLLM2, TOKENS, check_is_fast, real

pytestmark = pytest.mark.real


def test_a_server_says_what_the_engine_says() -> None:
    """Guards the way from a question over HTTP through template, drafter and tokenizer, and back."""
    engine = load(real(SMOLLM2))
    check_is_fast(engine)
    command = [
        sys.executable,
        "-m",
        "paradraft",
        "serve",
        "--target",
        real(SMOLLM2),
        "--drafter",
        "ngram",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}) as process:
        try:
            assert process.stderr is not None
            url = next(found[0] for line in process.stderr if (found := re.search(r"http://[\d.:]+", line)))
            for question in QUESTIONS:
                for sampling in (GREEDY, Sampling(temperature=0.8, top_p=0.95, seed=5)):
                    body = {
                        "messages": [{"role": "user", "content": question}], "max_tokens": TOKENS,
                        "temperature": sampling.temperature, "top_p": sampling.top_p, "seed": sampling.seed,
                    }  # fmt: skip
                    answer = httpx2.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
                    prompt = engine.chat_tokens([{"role": "user", "content": question}])
                    expected = engine.generate(prompt, max_new_tokens=TOKENS, sampling=sampling)
                    assert answer["choices"][0]["message"]["content"] == expected.text
                    assert answer["usage"]["completion_tokens"] == len(expected.tokens)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
