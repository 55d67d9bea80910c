"""Mutants: bugs that are planted one at a time, to learn whether the tests notice.

``make mutants`` copies the tree, plants each bug of the list in the copy, and runs the few tests
that must fail with it. One that survives is a promise without a test. The list is data, a module
per part of the code; see `tests.mutants.mutant` for how to add to it.
"""
