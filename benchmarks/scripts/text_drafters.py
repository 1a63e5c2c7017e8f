"""Drafters without a model on some prompts: speeds in turns, tokens a pass at a node budget, and speeds on other CPUs.

    python benchmarks/scripts/text_drafters.py --target FILE --prompts benchmarks/prompts/chat.jsonl --number 12
        --drafters suffix,suffix+recycle --alone recycle --temperatures 0,0.8 --costs FILE --json FILE

"measured": all drafters and plain decoding answer a prompt after each other, another one first each time, with their
default draft lengths; speedups are without the prompts: of all answers together; of the median answer; and "steady",
where every round has the median time of all drafters' rounds with as many nodes, so that a burst of other work beside
one drafter does not count. "budget": every round drafts a tree of as many nodes, or a chain of as many tokens, whatever
it costs; tokens a pass do not depend on the machine then. With "costs" the policy has default lengths, but sees the
times of passes in a file of `pass_costs.py`, measured on another machine. Speedups are of the passes alone, and with
the drafter's time as measured here. Under the match rule all have the same text, which is checked.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from replayed_drafts import cost_line
from rich.progress import track

import paradraft
from paradraft.bench.report.summary import write_json
from paradraft.decode.stats import RoundOutput, RoundTime
from paradraft.drafters import traits_of
from paradraft.engine.answers import Result
from paradraft.engine.engine import Engine
from paradraft.environment import describe_machine
from paradraft.sampling_params import Sampling
from paradraft.serve.grammar import Grammars
from paradraft.tree import Tree

PLAIN = "none"


class Paced:
    """Counts the rounds of an engine; with a cost line (milliseconds), its length policy gets pass times from there."""

    def __init__(self, engine: Engine, cost: Callable[[int], float] | None) -> None:
        self._observe, self._cost = engine.lengths.observe, cost
        self.pass_s = self.draft_s = 0.0
        self.sizes_s: list[tuple[int, float]] = []
        """Nodes and time of each round, without the drafter's."""
        self.nodes = self.rounds = self.tokens = 0
        engine.lengths.observe = self.observe  # type: ignore[method-assign]  # which calls the policy's

    def observe(self, output: RoundOutput, time: RoundTime | None) -> None:
        """Takes the place of the policy's."""
        assert time is not None, "prompts are read whole"
        (nodes,), (tokens,) = output.nodes, output.tokens
        self.sizes_s.append((nodes, time.verify_s + time.other_s))
        time = time if self._cost is None else replace(time, verify_s=self._cost(1 + nodes) / 1e3)
        self.pass_s, self.draft_s = self.pass_s + time.verify_s, self.draft_s + time.draft_s
        self.nodes, self.rounds, self.tokens = self.nodes + nodes, self.rounds + 1, self.tokens + len(tokens)
        self._observe(output, time)

    def figures(self) -> dict[str, float]:
        """Of all rounds so far."""
        found = {
            "rounds": self.rounds,
            "acceptance_length": self.tokens / self.rounds,
            "nodes_per_round": self.nodes / self.rounds,
            "draft_ms_per_round": 1e3 * self.draft_s / self.rounds,
        }
        if self._cost is not None:
            plain_s = self._cost(1) / 1e3 * self.tokens
            found["speedup"] = plain_s / self.pass_s
            found["speedup_with_drafter"] = plain_s / (self.pass_s + self.draft_s)
        return found


class Asker:
    """Answers prompts with an engine, each with its own seed, and JSON tasks by their schemas."""

    def __init__(self, tasks: list[dict[str, Any]], most: int, *, is_raw: bool) -> None:
        self.tasks, self.most, self.is_raw = tasks, most, is_raw

    def answer(self, engine: Engine, number: int, temperature: float) -> Result:
        """The answer to a task."""
        task = self.tasks[number]
        messages = task.get("messages") or [{"role": "user", "content": task["prompt"]}]
        prompt = engine.prompt_tokens(task["prompt"]) if self.is_raw else engine.chat_tokens(messages)
        processors = []
        if "schema" in task:
            grammars = Grammars(engine.target.facts)
            matcher = grammars.matcher(task["schema"], is_compact=True)
            processors = [grammars.grammar(matcher, prompt=len(prompt), is_compact=True)]
        sampling = Sampling(temperature=temperature, seed=number, processors=processors)
        return engine.generate(prompt, max_new_tokens=self.most, sampling=sampling)


def measured(asker: Asker, engines: dict[str, Engine], temperature: float) -> tuple[dict[str, Any], list[list[int]]]:
    """Speeds of all drafters in turns, and the tokens of the answers."""
    paced = {name: Paced(engine, None) for name, engine in engines.items()}
    answers: dict[str, list[Result]] = {name: [] for name in engines}
    for number in track(range(len(asker.tasks)), f"T = {temperature}, in turns"):
        first = number % len(engines)
        for name in [*engines][first:] + [*engines][:first]:
            answers[name].append(asker.answer(engines[name], number, temperature))
    texts = [answer.tokens for answer in answers[PLAIN]]
    assert all([answer.tokens for answer in each] == texts for each in answers.values()), "another text"
    seconds = {
        name: [answer.stats.total_s - answer.stats.prefill_s for answer in each] for name, each in answers.items()
    }
    steady_s = steady(paced)
    found = {
        name: {
            **paced[name].figures(),
            "speedup": sum(seconds[PLAIN]) / sum(own),
            "steady_speedup": steady_s[PLAIN] / steady_s[name],
            "median_speedup": statistics.median(map(operator.truediv, seconds[PLAIN], own)),
            "draft_share": paced[name].draft_s / sum(own),
            "seconds": own,
        }
        for name, own in seconds.items()
    }
    return found, texts


def steady(paced: dict[str, Paced]) -> dict[str, float]:
    """The time of the rounds of all drafters, if those with as many nodes all took as long."""
    of_size = defaultdict(list)
    for each in paced.values():
        for nodes, round_s in each.sizes_s:
            of_size[nodes].append(round_s)
    typical_s = {nodes: statistics.median(times) for nodes, times in of_size.items()}
    return {name: sum(typical_s[nodes] for nodes, _ in each.sizes_s) + each.draft_s for name, each in paced.items()}


def counted(asker: Asker, engine: Engine, temperature: float, texts: list[list[int]], cost: Any) -> dict[str, float]:
    """Figures of a drafter whose times do not matter."""
    paced = Paced(engine, cost)
    for number, tokens in enumerate(texts):
        assert asker.answer(engine, number, temperature).tokens == tokens, "another text"
    return paced.figures()


def main() -> None:
    """Reads the options, measures, prints lines and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with prompt or messages, and maybe a schema")
    parser.add_argument("--raw", action="store_true", help="prompts are texts to go on with, not messages of a chat")
    parser.add_argument("--number", type=int, required=True, help="of prompts, as far apart in the file as possible")
    parser.add_argument("--drafters", default="suffix,suffix+recycle", help="beside none, with commas")
    parser.add_argument("--alone", default="recycle", help="drafters that draft with the budget only, with commas")
    parser.add_argument("--draft", help="the draft model of drafters that have one")
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--tokens", type=int, default=96, help="most of an answer")
    parser.add_argument("--budget", type=int, default=12, help="nodes of the fixed drafts; 0 for none")
    parser.add_argument("--costs", type=Path, action="append", default=[])
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    lines = given.prompts.read_text(encoding="utf-8").splitlines()
    tasks = [json.loads(line) for line in lines[:: max(len(lines) // given.number, 1)][: given.number]]
    asker = Asker(tasks, given.tokens, is_raw=given.raw)
    drafters, at_a_budget = given.drafters.split(","), ",".join(filter(None, (given.drafters, given.alone))).split(",")

    def loaded(drafter: str, **settings: Any) -> Engine:
        draft = given.draft if drafter.endswith(("autoregressive", "pard")) else None
        return paradraft.load(given.target, drafter=drafter, draft=draft, **settings)

    def at_budget(drafter: str) -> Engine:
        tree = Tree(budget=given.budget) if traits_of(drafter).branching == "tree" else None
        return loaded(drafter, k=given.budget, tree=tree, lengths="fixed")

    found: dict[str, Any] = {}
    for temperature in map(float, given.temperatures.split(",")):
        of_all, texts = measured(asker, {name: loaded(name) for name in (PLAIN, *drafters)}, temperature)
        figures = {"measured": of_all}
        if given.budget:
            figures["budget"] = {
                name: counted(asker, at_budget(name), temperature, texts, None) for name in at_a_budget
            }
        for file in given.costs:
            cost = cost_line(file)
            figures[file.stem] = {name: counted(asker, loaded(name), temperature, texts, cost) for name in drafters}
        found[f"t{temperature:g}"] = figures
        for kind, by_name in figures.items():
            for name, each in by_name.items():
                numbers = ", ".join(f"{key} {value:.3f}" for key, value in each.items() if isinstance(value, float))
                print(f"T = {temperature:g}, {kind}, {name}: {numbers}", flush=True)
        settings = {key: value for key, value in vars(given).items() if key not in ("json", "costs")}
        settings |= {key: Path(settings[key]).name for key in ("target", "prompts", "draft") if settings[key]}
        write_json(given.json, {"settings": settings, "temperatures": found, "machine": describe_machine("cpu")})


if __name__ == "__main__":
    main()
