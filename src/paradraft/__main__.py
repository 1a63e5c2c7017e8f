"""`python -m paradraft`."""

from paradraft.cli import main

main()
