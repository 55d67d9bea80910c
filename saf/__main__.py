"""``python -m saf`` is the command ``saf``."""

from saf.cli import main

main()
