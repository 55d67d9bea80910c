"""``python -m saf`` is the command ``saf``."""

from saf.cli import program

program()
