"""The command ``saf``, as ``python -m saf`` and as a program."""

from saf.signals import end_at_interrupt

end_at_interrupt()

from saf.cli import program  # noqa: E402 - its imports take most of a second

if __name__ == "__main__":
    program()
