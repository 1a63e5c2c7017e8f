"""What the time of PARD answers is made of: prompts, passes of both models, and the rest; and what bounds the speedup.

Answers take turns with those of plain decoding. A speedup with a part left out says what could be gained there at most.

python benchmarks/scripts/round_parts.py --methods int8:8,int4:4 --json FILE.json
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from paradraft.bench.hardware.roofline import Size, speeds_for, total
from paradraft.bench.report.summary import write_json
from paradraft.bench.setup import random_prompts
from paradraft.bench.synthetic import SyntheticAcceptance, rounds, without_ends
from paradraft.decode.stats import Stats
from paradraft.drafters import load_drafter
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.speculation import Speculation
from paradraft.environment import describe_machine
from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.build import kernel_names
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import Sampling
from paradraft.sources.target_loading import load_target
from paradraft.verify import Verify, load_rule

TARGET, DRAFT = "shape:smollm2-360m", "shape:smollm2-135m"
RATES = "0.869,0.737,0.607,0.527,0.460,0.374,0.346,0.298"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, TRIES = 4, 128, 128, 3
Parts = dict[str, float]


class TimedPass:
    """A model's pass that books its time.

    Args:
        lm: the model, whose passes go through this from now on.
        name: of the model.
        seconds: by part, changed.
    """

    def __init__(self, lm: CausalLM, name: str, seconds: Parts) -> None:
        self._pass, self._name, self._seconds = lm._compute, name, seconds
        lm._compute = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pass, name)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The pass."""
        begun_s = time.perf_counter()
        out = self._pass(*given, **named)
        kind = "pass" if named["logit_rows"].shape[1] else "prompt"
        self._seconds[f"{self._name}_{kind}"] += time.perf_counter() - begun_s
        return out


class Case:
    """The models of a dtype, plain and with a drafter."""

    def __init__(self, dtype: str, k: int) -> None:
        self.seconds: Parts = defaultdict(float)
        runtime = Runtime(device="cpu", dtype=dtype, capacity=512)
        target = load_target(TARGET, runtime)
        without_ends(target)
        drafter = load_drafter("pard", target, draft=DRAFT, runtime=runtime)
        self.draft = drafter.models[0]
        for name, lm in (("target", target.lm), ("draft", self.draft)):
            TimedPass(lm, name, self.seconds)
        speculation = Speculation(drafter="pard", draft=DRAFT, k=k)
        self.engines = {
            "ar": Engine(target, NoDrafter(), Speculation(k=1)),
            "pard": Engine(target, drafter, speculation),
        }
        drawn = SyntheticAcceptance.parse(RATES).instead_of(load_rule(speculation.verify))
        self.rules: dict[str, Verify | None] = {"ar": None, "pard": drawn}

    def answer(self, name: str, prompt: str) -> Stats:
        """Answers a prompt by one method; plain decoding has its own verdicts."""
        engine = self.engines[name]
        batch = engine.new_batch(verify=self.rules[name])
        with engine.in_round():
            for _ in rounds(batch, [prompt], NEW_TOKENS, [Sampling(temperature=0.0, seed=zlib.crc32(prompt.encode()))]):
                pass
        return batch.clock.stats

    def turn(self, prompt: str) -> dict[str, Parts]:
        """The seconds of one answer by each method, by part."""
        found = {}
        for name in self.engines:
            self.seconds.clear()
            stats = self.answer(name, prompt)
            parts = dict(self.seconds)
            found[name] = parts | {"rest": stats.total_s - sum(parts.values()), "total": stats.total_s}
            found[name]["rounds"] = stats.rounds
        return found

    def draft_floor_s(self, prompt: str) -> float:
        """How long memory takes to bring what the draft's passes of an answer read, prompts apart: the best of several
        tries, since a program that runs beside one would make the floor too high."""
        speeds = speeds_for([self.draft])
        for _ in range(TRIES - 1):
            speeds.measure()
        self.answer("pard", prompt)
        size = Size.of(self.draft.model, self.draft.weight_bytes)
        drafts = Counter({one: number for one, number in self.draft.passes.items() if one.logits})
        return total(drafts, size, speeds).bytes / speeds.bytes_per_s(size.weight_bytes)


def medians(turns: list[dict[str, Parts]]) -> dict[str, Parts]:
    """Of each part of an answer by each method, in ms; and of the number of rounds."""
    return {
        name: {
            part: statistics.median(turn[name].get(part, 0.0) for turn in turns) * (1 if part == "rounds" else 1000)
            for part in turns[0][name]
        }
        for name in turns[0]
    }


def summary(turns: list[dict[str, Parts]], draft_floor_s: float) -> dict[str, Any]:
    """Medians of an answer's parts in ms, and the speedups with parts left out."""
    parts, floor = medians(turns), draft_floor_s * 1000
    ar, pard = parts["ar"], parts["pard"]
    prompts = pard["target_prompt"] + pard["draft_prompt"]
    return {
        "ms": parts,
        "draft_floor_ms": floor,
        "speedup": ar["total"] / pard["total"],
        "speedup_without_rest": ar["total"] / (pard["total"] - pard["rest"]),
        "speedup_without_prompts": (ar["total"] - ar["target_prompt"]) / (pard["total"] - prompts),
        "speedup_with_draft_at_floor": ar["total"] / (pard["total"] - pard["draft_pass"] + floor),
        "speedup_without_rest_with_draft_at_floor": ar["total"]
        / (pard["total"] - pard["rest"] - pard["draft_pass"] + floor),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="int8:8,int4:4", help="dtypes, and how many tokens are drafted in each")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    prompts, found = random_prompts(TARGET, PROMPTS, PROMPT_TOKENS), {}
    for method in given.methods.split(","):
        dtype, _, k = method.partition(":")
        case = Case(dtype, int(k))
        turns = [case.turn(prompt) for _ in range(given.runs) for prompt in [prompts[0], *prompts]][1:]
        found[method] = summary(turns, case.draft_floor_s(prompts[0]))
        print(method, {key: round(value, 3) for key, value in found[method].items() if key != "ms"})
        for name, parts in found[method]["ms"].items():
            print("   ", name, *(f"{part} {value:.1f}" for part, value in parts.items()))
    if given.json:
        machine = describe_machine("cpu") | {"kernels": kernel_names()}
        write_json(given.json, {"target": TARGET, "draft": DRAFT, "rates": RATES, "cases": found, "machine": machine})


if __name__ == "__main__":
    main()
