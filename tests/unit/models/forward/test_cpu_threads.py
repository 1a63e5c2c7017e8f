"""Threads of passes in C++: as many as are granted, in any number of Python threads, and after a fork."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

import pytest
import torch

from paradraft.models.causal_lm import CausalLM
from paradraft.models.forward.cpu.threads import cpu_quota, granted_threads, one_torch_thread
from tests.support.decoding import empty_rows
from tests.support.random_models import random_model


def lm_of(threads: int) -> CausalLM:
    lm = CausalLM(random_model(), vocab_size=60)
    assert lm.is_native
    lm._compute.threads = threads
    empty_rows(lm, 1)
    return lm


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def test_the_quota_is_that_of_the_tightest_group(tmp_path: Path) -> None:
    """Guards containers whose limit is set on a group above that of the process, as Kubernetes does."""
    membership = tmp_path / "membership"
    membership.write_text("0::/pod/container\n")
    group(tmp_path / "pod" / "container", cpu__max="max 100000\n")
    assert cpu_quota(tmp_path, membership) == math.inf
    group(tmp_path / "pod", cpu__max="150000 100000\n")
    assert cpu_quota(tmp_path, membership) == 1.5


def test_the_quota_of_version_1(tmp_path: Path) -> None:
    """Guards older systems, where each controller has groups of its own."""
    membership = tmp_path / "membership"
    membership.write_text("3:cpuset:/a\n2:cpu,cpuacct:/box\n1:memory:/b\n")
    group(tmp_path / "cpu,cpuacct" / "box", cpu__cfs_quota_us="200000\n", cpu__cfs_period_us="100000\n")
    assert cpu_quota(tmp_path, membership) == 2.0
    group(tmp_path / "cpu,cpuacct" / "box", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cpu_quota(tmp_path, membership) == math.inf


@pytest.mark.parametrize("content", ["", "nonsense", "1 0", "a b"])
def test_a_quota_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    """Guards the load of a model against systems that write something else."""
    membership = tmp_path / "membership"
    membership.write_text("0::/\n")
    group(tmp_path, cpu__max=content)
    assert cpu_quota(tmp_path, membership) == math.inf
    assert cpu_quota(tmp_path, tmp_path / "absent") == math.inf


def test_no_more_threads_than_cpus_that_may_be_used() -> None:
    """Guards `taskset`: two threads on one CPU take turns, and each waits for the other."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert granted_threads() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_torch_has_one_thread_inside_only() -> None:
    """Guards the user's own setting, which must come back, also after an error."""
    before = torch.get_num_threads()
    with one_torch_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), one_torch_thread():
        raise KeyError
    assert torch.get_num_threads() == before


def test_passes_in_several_threads_do_not_meet() -> None:
    """Guards the threads that help: each pass has a team of its own, and none does the work of another."""
    text = torch.randint(1, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    lms = [lm_of(threads) for threads in (1, 2, 3, 4)]
    expected = lms[0].forward(text).logits
    wrong: list[int] = []

    def check(number: int) -> None:
        for _ in range(50):
            if not torch.equal(lms[number].forward(text).logits, expected):
                wrong.append(number)

    threads = [threading.Thread(target=check, args=(number,)) for number in range(len(lms))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:This process")
def test_a_child_process_has_helpers_of_its_own() -> None:
    """Guards `fork`, which copies no threads: a child that waited for its parent's helpers would never end."""
    lm, text = lm_of(3), torch.arange(1, 20)[None]
    expected = lm.forward(text).logits
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(lm.forward(text).logits, expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
