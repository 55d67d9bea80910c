"""What is in the processes of a recorded run; see `tests.mutants.recording`."""
