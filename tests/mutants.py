"""What `make mutants` has found: the small faults that no test notices, without those that tests/mutants.toml explains.

Run it from the root of the repository after `mutmut run`. The exit code is 1 if a fault is left over, or if an
explanation fits no fault any more.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

EXPLAINED = Path(__file__).with_suffix(".toml")
NOTICED = ("killed", "timeout", "segfault")
"""A fault that lets a test run for ever, or crash, is noticed too."""


def signature(name: str, diff: str) -> str:
    """A fault in one line that does not change when other code does: where it is, the line, what becomes of it.

    For example "paradraft.sampling.candidates.grown: return [] => return None".
    """
    module, _, mangled = name.rpartition("__mutmut_")[0].rpartition(".")
    function = mangled.removeprefix("x_").removeprefix("xǁ").replace("ǁ", ".")
    lines = diff.splitlines()[2:]
    was, becomes = (" ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+")
    return f"{module}.{function}: {was} => {becomes}"


def follows(mutant: str, rules: list[dict[str, Any]]) -> bool:
    """Whether a fault is one that changes nothing wherever it is, such as a `strict=True` that is left out."""
    was, becomes = mutant.partition(": ")[2].split(" => ", 1)
    return any(
        plain(was[: match.start()] + other + was[match.end() :]) == plain(becomes)
        for rule in rules
        for match in re.finditer(rule["line"], was)
        for other in rule["becomes"]
    )


def plain(line: str) -> str:
    """Code without spaces, and without what an argument that was left out leaves."""
    return re.sub(r",(?=[,)])", "", line.replace(" ", "")).replace("(,", "(")


def main() -> int:
    """Prints the faults that are left over, and a table of counts."""
    # Here, because tests read this file where mutmut is not installed.
    from mutmut.mutation.data import SourceFileMutationData
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.stats import status_by_exit_code
    from mutmut.utils.file_utils import walk_mutatable_files

    table = tomllib.loads(EXPLAINED.read_text(encoding="utf-8"))
    explained = {mutant for group in table["explained"] for mutant in group["mutants"]}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    found = set[str]()
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        for name, exit_code in data.exit_code_by_key.items():
            status = status_by_exit_code[exit_code]
            if status not in (*NOTICED, "not checked"):
                mutant = signature(name, get_diff_for_mutant(name, path=path))
                found.add(mutant)
                status = "explained" if mutant in explained or follows(mutant, table["everywhere"]) else status
                if status != "explained":
                    print(f"{name}: {status}\n  {mutant}")
            counts[str(path)][status] += 1
    for file, count in counts.items():
        print(f"{file}: {count.total()} faults, " + ", ".join(f"{number} {status}" for status, number in count.items()))
    everything = sum(counts.values(), Counter[str]())
    gone = [] if everything["not checked"] else sorted(explained - found)
    for mutant in gone:
        print(f"explained, but noticed or not there any more: {mutant}")
    return int(bool(gone) or any(status not in (*NOTICED, "explained", "not checked") for status in everything))


if __name__ == "__main__":
    sys.exit(main())
