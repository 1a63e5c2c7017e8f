"""The models of `make real-models`; without them tests fail with one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paradraft.decode.stats import Stats
from paradraft.drafters import load_drafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import GREEDY, Sampling

REAL = Path(__file__).parents[2] / "build" / "real"
SMOLLM2, CODER_05B, CODER_15B = (
    "smollm2-135m-instruct.Q4_1.gguf", "qwen2.5-coder-0.5b-instruct.Q4_K_M.gguf",
    "qwen2.5-coder-1.5b-instruct.Q4_K_M.gguf",
)  # fmt: skip
FOLDERS = {"smollm2-135m-instruct": SMOLLM2, "qwen2.5-coder-0.5b-instruct": CODER_05B}
"""With the file that each was made of."""
TARGETS = [(name, "auto") for name in (SMOLLM2, CODER_05B, CODER_15B)]
TARGETS += [(name, dtype) for name in FOLDERS for dtype in ("bfloat16", "int8", "int4")]
TEXT = "Anna lives in a small house by the lake. Every morning she walks to the old bridge and feeds the ducks."
CODE = "def total(prices):\n    result = 0\n    for price in prices:\n        result += price\n    return result\n"
QUESTIONS = (
    f"Repeat the following text word for word:\n\n{TEXT}",
    f"Write this function again, with `prices` renamed to `costs`:\n\n```python\n{CODE}```",
    "Why is the sky blue?",
    "Write a Python function that says whether a number is prime.",
)
TOKENS = 32
SAMPLINGS = {"T=0": GREEDY, "T=0.8": Sampling(temperature=0.8, top_p=0.95, seed=11)}


def real(name: str) -> str:
    """The path of a file or folder; without it the test fails."""
    if not (path := REAL / name).exists():
        pytest.fail(f"{path} is not there: make real-models", pytrace=False)
    return str(path)


def check_is_fast(engine: Engine) -> None:
    """Fails where a pass is not the one in C++: the others are ten times slower."""
    slow = [lm.model.config.name_or_path for lm in (engine.target.lm, *engine.drafter.models) if not lm.is_native]
    if slow:
        pytest.fail(f"not decoded by the pass in C++: {', '.join(slow)}", pytrace=False)


@dataclass
class Loaded:
    """A target without a drafter, and its answers, each alone in its batch."""

    name: str
    engine: Engine
    answers: dict[str, list[list[int]]] = field(default_factory=dict)

    def prompts(self) -> list[list[int]]:
        return [self.engine.chat_tokens([{"role": "user", "content": question}]) for question in QUESTIONS]

    def plain(self, sampling: str) -> list[list[int]]:
        """The answers to `QUESTIONS`."""
        if sampling not in self.answers:
            self.answers[sampling] = [
                self.engine.generate(prompt, max_new_tokens=TOKENS, sampling=SAMPLINGS[sampling]).tokens
                for prompt in self.prompts()
            ]
        return self.answers[sampling]

    def with_drafter(self, speculation: Speculation) -> Engine:
        """The same target with a drafter."""
        target = self.engine.target
        engine = Engine(
            target, load_drafter(speculation.drafter, target, draft=speculation.draft, runtime=Runtime()), speculation
        )
        check_is_fast(engine)
        return engine

    def check(self, engine: Engine, sampling: str, *, batch_size: int) -> list[Stats]:
        """Fails where an answer is another one with a drafter; returns what was counted."""
        expected, stats = self.plain(sampling), list[Stats]()
        prompts, settings = self.prompts(), SAMPLINGS[sampling]
        for start in range(0, len(prompts), batch_size):
            batch = slice(start, start + batch_size)
            found = engine.generate(prompts[batch], max_new_tokens=TOKENS, sampling=settings)
            assert [answer.tokens for answer in found] == expected[batch]
            stats += [answer.stats for answer in found]
        return stats


@pytest.fixture(scope="module", params=TARGETS, ids=lambda target: "-".join(target))
def target(request: pytest.FixtureRequest) -> Loaded:
    """Each file, and each folder in bfloat16, int8 and int4."""
    name, dtype = request.param
    engine = load(real(name), dtype=dtype)
    check_is_fast(engine)
    return Loaded(name=name, engine=engine)
