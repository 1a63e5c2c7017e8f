"""The Python interface on one page: load, generate, stream, sample.

Run it: `python examples/quickstart.py`. Without arguments it uses the shipped pocket family.
"""

from __future__ import annotations

import argparse

import paradraft

PROMPT = "def is_even(number):\n"


def main(arguments: list[str] | None = None) -> None:
    """Answers one prompt in three ways."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--target", default="pocket", help="Hugging Face id, folder, or pocket")
    parser.add_argument("--draft", default=None, help="PARD folder or Hugging Face id; pocket brings its own")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args(arguments)

    engine = paradraft.load(args.target, drafter="pard", draft=args.draft, k=8)

    # 1. Greedy. The result has the text, the token ids and the statistics.
    result = engine.generate(PROMPT, max_new_tokens=args.max_new_tokens)
    print(PROMPT + result.text)
    stats = result.stats
    print(f"{stats.tokens} tokens in {stats.rounds} target passes, acceptance length {stats.acceptance_length:.2f}")
    print(f"draft {stats.draft_s:.2f} s, verify {stats.verify_s:.2f} s, in all {stats.total_s:.2f} s")

    # 2. Sampled. The same seed gives the same text with every drafter, and without one.
    sampling = paradraft.Sampling(temperature=0.8, top_p=0.95, seed=7)
    drafted = engine.generate(PROMPT, max_new_tokens=args.max_new_tokens, sampling=sampling)
    plain = paradraft.load(args.target).generate(PROMPT, max_new_tokens=args.max_new_tokens, sampling=sampling)
    print(f"the sampled texts with and without a drafter are equal: {drafted.tokens == plain.tokens}")

    # 3. Streamed. A chunk is one round: the drafted tokens that were accepted, then the target's own.
    for chunk in engine.stream(PROMPT, max_new_tokens=args.max_new_tokens):
        print(f"{chunk.accepted} accepted: {chunk.drafted_text!r} + {chunk.own_text!r}")


if __name__ == "__main__":
    main()
