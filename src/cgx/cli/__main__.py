"""`python -m cgx.cli`: the `cgx` command where scripts are not on the path."""

from cgx.cli import main

main()
