"""How often prompt tokens guess the right token: a table of trained checkpoints, as PPD's Tables 2 to 8 have it.

    python benchmarks/scripts/ppd_accuracy.py build/ppd-1 build/ppd-5 … --json FILE

Each folder is one that `paradraft train ppd` wrote; its config holds the shares of held-out rows in which the guess of
each rank was the text's token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

TOLD = ("k", "copies", "loss", "visibility", "aggregation", "prefix", "exits", "own_head", "start", "anchors", "steps")


def row_of(folder: Path) -> dict[str, Any]:
    """What a run was, and its accuracy among the first 1, 5 and 10 guesses, by distance."""
    run = json.loads((folder / "train_command.json").read_text())
    accuracy = json.loads((folder / "config.json").read_text())["accuracy"]
    return {
        "name": folder.name,
        "settings": {name: run["recipe"][name] for name in TOLD},
        "data_sha256": run["data_sha256"],
        "machine": run["machine"],
        "held_out_loss": run["best"]["held_out_loss"],
        "acceptance_length": run["best"]["acceptance_length"],
        "top": {str(most): [round(sum(ranks[:most]), 4) for ranks in accuracy] for most in (1, 5, 10)},
    }


def main() -> None:
    """Prints the table, and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row_of(folder) for folder in args.folders]
    print("| run | @1 top-1 | top-5 | top-10 | @2 top-1 | top-5 | top-10 | @3 top-1 | top-5 | top-10 |")
    print("|---" * 10 + "|")
    for row in rows:
        shares = [f"{row['top'][most][distance]:.3f}" for distance in range(3) for most in ("1", "5", "10")]
        print(f"| {row['name']} | {' | '.join(shares)} |")
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
