"""`python -m skyctl` is the `skyctl` command."""

from skyctl.cli.app import main

main()
