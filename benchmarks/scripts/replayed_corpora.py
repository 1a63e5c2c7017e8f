"""What a corpus adds to the drafts of `suffix` in the recorded answers of the real models, and what it costs.

    python benchmarks/scripts/replayed_corpora.py --data humaneval=FILE --data gsm8k=FILE \
        --corpus gsm8k=FILE --json benchmarks/FILE.json

Acceptance lengths are exact, as in `replayed_drafts.py`. The corpora are the source of Python's standard library; the
files of `--corpus`, such as the answers of GSM8K's training set; and the recorded prompts and answers of all other
questions, a corpus for each question, as a server would have whose clients ask alike. None has the answer itself.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from replayed_drafts import COSTS, FOLDER, MODELS, answers_of, cost_of, replay

from paradraft.bench.report.summary import write_json
from paradraft.drafters.parts.corpus import Corpus, read_corpus
from paradraft.drafters.suffix import Config, SuffixDrafter
from paradraft.environment import describe_machine
from paradraft.models.target import TargetFacts
from paradraft.sources.loading import load_tokenizer

K, DEPTH, PLACES = 8, Config().depth, Config().places
LOOKUPS, CONTEXT = 3000, 64


def standard_library(folder: Path) -> Path:
    """Writes a file of the modules in the top folder of Python's standard library."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    file = folder / "standard-library.txt"
    file.write_text("\n\n".join(module.read_text(encoding="utf-8") for module in modules), encoding="utf-8")
    return file


def costs(file: Path, target: TargetFacts) -> tuple[Corpus, dict[str, Any]]:
    """A corpus, with the times to read and to index it, and of looking up texts that it has and texts that it lacks."""
    begun_s = time.perf_counter()
    tokens = read_corpus(str(file), target, depth=1).tokens
    read_s = time.perf_counter() - begun_s
    begun_s = time.perf_counter()
    corpus = Corpus([tokens], depth=DEPTH)
    index_s = time.perf_counter() - begun_s
    chooser = random.Random(0)
    ends = [chooser.randrange(CONTEXT, len(tokens) - CONTEXT) for _ in range(LOOKUPS)]
    known = [list(tokens[end - CONTEXT : end]) for end in ends]
    unknown = [[*text, *tokens[end + 9 : end + 11]] for text, end in zip(known, ends, strict=True)]
    lookup_us = {}
    for name, texts in (("known", known), ("unknown", unknown)):
        begun_s = time.perf_counter()
        for text in texts:
            corpus.matches(text, places=PLACES)
        lookup_us[name] = (time.perf_counter() - begun_s) / LOOKUPS * 1e6
    figures = {"bytes": file.stat().st_size, "places": len(corpus), "read_s": read_s, "index_s": index_s}
    return corpus, {**figures, "lookup_us": lookup_us}


def main() -> None:
    """Replays the answers with and without each corpus and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", action="append", required=True, help="TASK=FILE, the questions of a task")
    parser.add_argument("--corpus", action="append", default=[], help="TASK=FILE, a corpus for a task")
    parser.add_argument("--models", type=Path, default=FOLDER.parent / "build" / "real")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    found: dict[str, Any] = {}
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = standard_library(Path(folder))
        for model in MODELS:
            tokenizer = load_tokenizer(str(given.models / MODELS[model]))
            facts = TargetFacts(tokenizer=tokenizer, vocab_size=len(tokenizer), capacity=1, eos_ids=frozenset())
            files = [("humaneval", library), *((task, Path(file)) for task, file in split(given.corpus))]
            corpora: dict[str, dict[str, Corpus]] = {}
            for task, file in files:
                corpus, figures = costs(file, facts)
                corpora.setdefault(task, {})[file.stem] = corpus
                measured[f"{model} {file.stem}"] = figures
                print(f"{model:20} {file.stem}: {figures}")
            for (task, data), temperature in itertools.product(split(given.data), ("t0", "t0.8")):
                answers = answers_of(model, task, temperature, given.models, Path(data))
                others = [
                    Corpus([p + a for p, a in answers[:own] + answers[own + 1 :]], depth=DEPTH)
                    for own in range(len(answers))
                ]
                methods: dict[str, list[Corpus | None]] = {"none": [None] * len(answers), "other answers": [*others]}
                methods |= {name: [corpus] * len(answers) for name, corpus in corpora.get(task, {}).items()}
                for (name, each), machine in itertools.product(methods.items(), COSTS):
                    drafters = iter([SuffixDrafter(Config(), corpus) for corpus in each])
                    figures = replay((drafters.__next__, K, None, True), answers, cost_of(model, machine), {})
                    found.setdefault(f"{model} {task} {temperature} {machine}", {})[name] = figures
                    line = f"{model:20} {task:10} {temperature:5} {machine:8} {name:18}"
                    print(line, *(f"{key} {value:.2f}" for key, value in figures.items()), flush=True)
    write_json(given.json, {"replayed": found, "corpora": measured, "machine": describe_machine("cpu")})


def split(named: list[str]) -> list[tuple[str, str]]:
    """Tasks and files of an option."""
    return [(task, file) for task, _, file in (each.partition("=") for each in named)]


if __name__ == "__main__":
    main()
