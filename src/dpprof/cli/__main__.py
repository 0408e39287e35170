"""``python -m dpprof.cli``: the same as the command ``dpprof``."""

from dpprof.cli.main import main

main()
