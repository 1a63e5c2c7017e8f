from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from paradraft.bench import harness
from paradraft.bench.harness import Measured, measure, summarize
from paradraft.bench.result import BatchResult, PeerCounts
from paradraft.bench.spec import Method
from paradraft.decode.stats import added
from paradraft.sampling_params import GREEDY, Sampling

SIZE = 2**27


def answer(prompts: list[str], max_new_tokens: int, sampling: Sampling) -> BatchResult:
    return BatchResult(tokens=[[1] * max_new_tokens for _ in prompts], total_s=1.0, stats=None)


def measured(*answerers: Callable[..., BatchResult], device: str = "cpu") -> list[Measured]:
    methods = [Method.parse(f"ngram:k={k}") for k, _ in enumerate(answerers, start=1)]
    return measure(
        dict(zip(methods, answerers, strict=True)), ["a", "b"], max_new_tokens=4, sampling=GREEDY, runs=2,
        device=torch.device(device), report=lambda news: None,
    )  # fmt: skip


def test_the_memory_is_that_of_the_gpu_that_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `--device cuda:1` against the peaks of GPU 0, where nothing runs."""
    used = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: reset.append(device))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 7 if device == used else 0)
    reset: list[torch.device | None] = []
    assert [one.peak_gpu_bytes for one in measured(answer, answer, device="cuda:1")] == [7, 7]
    assert set(reset) == {used}
    assert [one.peak_gpu_bytes for one in measured(answer)] == [None]


@pytest.mark.skipif(not harness._reset_peak(), reason="the kernel keeps no peaks, or does not forget them")
def test_each_method_has_the_peak_of_its_own_answers() -> None:
    """Guards against one number for all methods of a process, and against what is resident when an answer is over."""

    def greedy_for_memory(*asked: object) -> BatchResult:
        torch.ones(SIZE, dtype=torch.uint8)
        return answer(*asked)

    before, much, after = (one.peak_rss_bytes for one in measured(answer, greedy_for_memory, answer))
    assert much - max(before, after) > 0.8 * SIZE


def test_a_method_with_its_own_process_has_that_ones() -> None:
    """Guards vLLM's number against that of the process which only asks it."""
    (one,) = measured(lambda *asked: replace(answer(*asked), peak_rss_bytes=5))
    assert one.peak_rss_bytes == 5


@pytest.mark.parametrize("refused", ["_FORGETS", "_KNOWS"])
def test_without_the_kernel_it_is_what_is_resident(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: str
) -> None:
    """Guards systems that keep no peak, or none that begins anew: the peak of the whole run would be no method's."""
    (tmp_path / "status").write_text("Name: paradraft\n")
    monkeypatch.setattr(harness, refused, {"_FORGETS": tmp_path, "_KNOWS": tmp_path / "status"}[refused])
    torch.ones(SIZE, dtype=torch.uint8)
    (one,) = measured(answer)
    assert one.peak_rss_bytes == pytest.approx(psutil.Process().memory_info().rss, abs=SIZE / 2)


def test_rounded_weights_are_no_yardstick_for_whole_ones() -> None:
    """Guards speedups against an `ar` that decodes another target, only because it is faster."""
    seconds = {"ar": 2.0, "ar:dtype=int8": 1.0, "ngram": 0.5}
    methods = {Method.parse(spec): took_s for spec, took_s in seconds.items()}
    answerers = {
        method: (
            lambda prompts, count, sampling, took_s=took_s: replace(answer(prompts, count, sampling), total_s=took_s)
        )
        for method, took_s in methods.items()
    }
    arguments = {"max_new_tokens": 4, "sampling": GREEDY, "runs": 1, "device": torch.device("cpu")}
    found = summarize(measure(answerers, ["a"], **arguments, report=lambda news: None), GREEDY)
    assert [found[method.spec]["speedup_vs_fastest_ar"] for method in methods] == [1.0, 2.0, 4.0]
    assert [found[method.spec]["speedup_vs_ar"] for method in methods] == [1.0, 1.0, 4.0]


def test_a_method_that_does_not_pay_says_so() -> None:
    """Guards users of a slower method, and against an alarm where its runs and those of AR+ overlap, or for AR+."""
    seconds = {"ar": [2.0, 2.2], "ngram": [4.0, 4.2], "pard": [2.1, 2.4], "pard:lengths=expected": [4.0, 4.0]}
    plain = replace(added([]), tokens=64, rounds=64)
    counts = replace(plain, rounds=60, drafted=(60,), accepted=(4,))
    measured = [
        Measured(
            method=(method := Method.parse(spec)), peak_rss_bytes=1,
            runs=[
                [BatchResult(tokens=[[1] * 64], total_s=took_s, stats=plain if method.name == "ar" else counts)]
                for took_s in runs
            ],
        )
        for spec, runs in seconds.items()
    ]  # fmt: skip
    advice = {spec: one["advice"] for spec, one in summarize(measured, GREEDY).items()}
    assert advice == {
        "ar": None,
        "ngram": "drafting made this 2.0 x slower here: try --lengths expected, or --drafter none",
        "pard": None,
        "pard:lengths=expected": "drafting made this 1.9 x slower here: try --drafter none",
    }
    useless = [replace(one, runs=4 * one.runs) for one in measured[:1] + measured[2:3]]
    for run in useless[1].runs:
        run[0] = replace(run[0], stats=replace(counts, accepted=(1,)))
    assert summarize(useless, GREEDY)["pard"]["advice"] == (
        "480 rounds with a draft gave 1.02 tokens each: try another drafter, or --drafter none"
    )


def test_a_drafter_that_stops_when_unsure_does_not_stand_above_one_that_yields_more() -> None:
    """Guards the comparison of methods whose drafts differ in length: of the rounds that drafted a token at all, the
    cautious one accepts all, and yet it gives fewer tokens per pass at every depth."""
    told = {
        "hf-prompt-lookup": PeerCounts.of(12, drafted=[2, 0, 0, 2, 0, 0, 0, 0], accepted=[2, 0, 0, 2, 0, 0, 0, 0]),
        "ngram:k=2": PeerCounts.of(12, drafted=[2, 2, 2, 2, 2], accepted=[2, 1, 2, 1, 1]),
    }
    measured = [
        Measured(
            method=Method.parse(spec), peak_rss_bytes=1,
            runs=[[BatchResult(tokens=[[1] * counts.tokens], total_s=1.0, stats=None, counts=counts)]],
        )
        for spec, counts in told.items()
    ]  # fmt: skip
    cautious, bold = summarize(measured, GREEDY).values()
    assert cautious["acceptance_per_position"] == [1.0, 1.0] and bold["acceptance_per_position"] == [1.0, 0.4]
    assert cautious["accepted_share_of_rounds"] == [0.25, 0.25] and bold["accepted_share_of_rounds"] == [1.0, 0.4]
    for one in (cautious, bold):
        assert one["acceptance_length"] == pytest.approx(1 + sum(one["accepted_share_of_rounds"]))
        assert one["acceptance_length_first_32"] is None  # who does not tell of rounds does not tell of their beginning


def test_the_beginning_of_answers_has_a_length_of_its_own() -> None:
    """Guards against lengths that come from a target which repeats itself: here only the second half is guessed."""
    tokens, accepted = list(range(64)), [0] * 32 + [3] * 8
    runs = [[BatchResult(tokens=[tokens], total_s=1.0, stats=None, accepted=[accepted])]]
    method = Method.parse("ngram:k=3")
    (found,) = summarize([Measured(method=method, runs=runs, peak_rss_bytes=1)], GREEDY).values()
    assert found["acceptance_length_first_32"] == 1.0
    beginning = [3] * 8 + [0] * 32
    runs = [[BatchResult(tokens=[tokens], total_s=1.0, stats=None, accepted=[beginning])]]
    (found,) = summarize([Measured(method=method, runs=runs, peak_rss_bytes=1)], GREEDY).values()
    assert found["acceptance_length_first_32"] == 4.0
