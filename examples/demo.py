"""`make demo`: the main job on the shipped pocket family, in a few minutes on two CPU cores.

It adapts the ordinary draft into a PARD drafter for a short while, streams one answer, compares
plain `generate` (AR), our decoding without a drafter (AR+), the ordinary draft (VSD), the drafter
just trained and the fully trained one that is shipped, and checks that all texts are the same. A
second run skips what is done. In the end a real chat model answers two questions, if it can be had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from paradraft.bench.report.plot import plot
from paradraft.bench.report.summary import notes, table, write_json
from paradraft.bench.result_file import completed
from paradraft.bench.run import run_benchmark
from paradraft.bench.setup import Workload, held_out_prompts
from paradraft.bench.spec import Benchmark, Method
from paradraft.cli.commands.train import run_with_display
from paradraft.cli.importing import hide_progress_bars
from paradraft.cli.terminal import GREEN, stream_answer, write
from paradraft.digests import model_digest
from paradraft.drafters.none import NoDrafter
from paradraft.engine.engine import Engine
from paradraft.engine.loader import load
from paradraft.engine.speculation import Speculation
from paradraft.models.names import POCKET
from paradraft.models.runtime import Runtime
from paradraft.sampling_params import GREEDY
from paradraft.sources.loading import pocket_folder
from paradraft.train.drafters.pard import build
from paradraft.train.drafters.pard_recipe import PardRecipe

DTYPE = "float32"
"""In float32 near-ties are too rare to flip a token, so texts can be compared with `generate`."""

FETCH = Path(__file__).parents[1] / "recipes" / "real" / "fetch.py"
REAL = Path("build") / "real" / "smollm2-135m-instruct.Q4_1.gguf"
PATIENCE_S = 10
"""How long the demo waits for a network that says nothing."""
QUESTIONS = {
    "Why is the sky blue? Answer in a few sentences.": (
        "Such an answer repeats little, and n-gram has little to copy: it drafts only where that pays."
    ),
    "Repeat the following text word for word:\n\nAnna lives in a small house by the lake. Every morning she walks to "
    "the old bridge and feeds the ducks. In the afternoon she repairs bicycles for her neighbours. In the evening she "
    "reads a book by the fire, and her dog sleeps beside her.": (
        "This answer copies the question, as answers do that edit a given text or code: n-gram drafts the copy."
    ),
}
"""With what each shows."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much the demo does."""

    steps: int
    prompts: int
    tokens: int


FULL = Size(steps=60, prompts=8, tokens=128)
SHORT = Size(steps=4, prompts=2, tokens=48)


def recipe(out: Path, size: Size) -> PardRecipe:
    """The short adaptation: the full one's settings (recipes/pocket/pard.yaml) for fewer steps."""
    return PardRecipe(
        model=POCKET,
        data=[pocket_folder("text.jsonl")],
        out=out,
        steps=size.steps,
        average="token_mean",
        samples_per_step=3,
        max_length=384,
        optimizer="muon",
        muon_lr=1e-2,
        lr=1e-3,
        max_grad_norm=None,
        warmup_steps=min(5, size.steps // 2),
        log_every=max(size.steps // 15, 1),
        save_every=30,
        held_out=0,
    )


def demo(out: Path, size: Size) -> bool:
    """Runs the demo; results go to `out`.

    Returns:
        Whether all texts were the same.
    """
    console = Console(highlight=False)
    wanted = recipe(out / "pard", size)
    # A drafter of other weights, texts or steps, from before an update, stays where it is.
    wanted = wanted.model_copy(update={"out": out / f"pard-{wanted.fingerprint[:6]}"})
    prompts = held_out_prompts(size.prompts, None, POCKET)

    console.rule("1. Adapt the ordinary draft into a parallel drafter (PARD with COD)")
    out.mkdir(parents=True, exist_ok=True)
    run_with_display(wanted, build)

    console.rule("2. One answer with the shipped drafter: [green]drafted and accepted[/], the rest is the target's own")
    engine = load(POCKET, drafter="pard", runtime=Runtime(dtype=DTYPE))
    stream_answer(engine, prompts[0], max_new_tokens=size.tokens, sampling=GREEDY)

    console.rule("3. Compare")
    results = out / "results.json"
    title = f"pocket, {size.prompts} held-out prompts x {size.tokens} tokens, greedy, {DTYPE}"
    family = {name: model_digest(pocket_folder(name)) for name in ("target", "draft", "pard")}
    setting = {"size": asdict(size), "trained": wanted.fingerprint, "family": family}
    report = earlier_report(results)
    if report.get("demo") == setting:
        console.print(f"measured before; delete {results} to measure again")
    else:
        with console.status("preparing") as status:
            report = compare(wanted.out, prompts, size, status.update)
        write_json(results, report | {"demo": setting})
    report = completed(report)  # one of an earlier version lacks figures
    plot(report, out / "results.png")
    console.print(table(report["methods"], title))
    console.print("\n".join(notes(report["methods"])))
    identical = all(figures["identical_to_ar"] for figures in report["methods"].values())
    console.print(
        "all texts are identical" if identical else "TEXTS DIFFER", style="bold green" if identical else "bold red"
    )
    console.print(f"plot: {out / 'results.png'}   raw numbers: {results}")
    return identical


def compare(trained: Path, prompts: list[str], size: Size, report: Callable[[str], None]) -> dict[str, Any]:
    """Measures all methods: AR, AR+, VSD, PARD with the drafter just trained, PARD with the shipped one."""
    specs = ["hf", "ar", "autoregressive:k=3", f"pard:draft={trained}", "pard"]
    benchmark = Benchmark(
        target=POCKET,
        methods=[Method.parse(spec, dtype=DTYPE) for spec in specs],
        sampling=GREEDY,
        runtime=Runtime(dtype=DTYPE),
        runs=1,
    )
    (found,) = run_benchmark(benchmark, [Workload.of(prompts, size.tokens)], report)
    return found


def earlier_report(file: Path) -> dict[str, Any]:
    """An earlier report; empty if there is none that is whole."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def fetched(*, may_wait: bool) -> bool:
    """Whether the real model is there, or could be fetched; what keeps it away is said in a sentence.

    Args:
        may_wait: whether to fetch it where it is not there.
    """
    if not may_wait:
        if not REAL.is_file():
            print(f"left out, since {REAL} is not here: `make real-models` fetches it, and so does `make demo`")
        return REAL.is_file()
    command = [sys.executable, str(FETCH), "--smallest", "--out", str(REAL.parent), "--patience", str(PATIENCE_S)]
    return subprocess.run(command, check=False).returncode == 0


def converse(file: Path, questions: dict[str, str], tokens: int = 96) -> bool:
    """Lets a chat model answer each question without and with the n-gram drafter, twice in turns.

    Args:
        file: of the model.
        questions: with what is to be said of each answer.
        tokens: most of an answer.

    Returns:
        Whether both texts were the same each time.
    """
    drafting = load(str(file), drafter="ngram")
    plain = Engine(drafting.target, NoDrafter(), Speculation(k=1))
    are_same = True
    for engine in (plain, drafting):
        engine.warm_up()
    for question, shown in questions.items():
        asked = drafting.chat_tokens([{"role": "user", "content": question}])
        write(f"\n> {question}\n\n")
        times_s, found = {plain: list[float](), drafting: list[float]()}, list[list[int]]()
        for engine in (plain, drafting, plain, drafting):
            is_shown = engine is drafting and not times_s[drafting]
            start_s, answer = time.perf_counter(), list[int]()
            for chunk in engine.stream(asked, max_new_tokens=tokens, sampling=GREEDY):
                answer += chunk.tokens
                if is_shown:
                    write(chunk.drafted_text, GREEN)
                    write(chunk.own_text)
            times_s[engine].append(time.perf_counter() - start_s)
            found.append(answer)
        is_same = all(answer == found[0] for answer in found)
        are_same &= is_same
        without_s, with_s = min(times_s[plain]), min(times_s[drafting])
        write(
            f"\n\n{len(found[0])} tokens in {without_s:.2f} s without a drafter and in {with_s:.2f} s with n-gram: "
            f"{without_s / with_s:.2f} times as fast, {'the same text' if is_same else 'ANOTHER TEXT'}.\n{shown}\n"
        )
    return are_same


def main() -> None:
    """Entry point of `python -m demo`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few steps and prompts only, and no download")
    parser.add_argument("--out", type=Path, default=None, help="build/demo, or build/demo-short with --short")
    args = parser.parse_args()
    out = args.out or Path("build") / ("demo-short" if args.short else "demo")
    hide_progress_bars()
    try:
        identical = demo(out, SHORT if args.short else FULL)
        Console(highlight=False).rule("4. A real chat model (SmolLM2 135M Instruct, Q4_1), without and with a drafter")
        if fetched(may_wait=not args.short):
            identical &= converse(REAL, QUESTIONS)
    except (ValueError, OSError) as error:
        raise SystemExit(f"demo: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit("demo: interrupted; the same command goes on") from None
    raise SystemExit(0 if identical else 1)


if __name__ == "__main__":
    main()
