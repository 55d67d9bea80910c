"""Imported last by the server that processes of tests are forked from.

What it has imported lives as long as it does. A process forked from it that looks for garbage would
touch, and so copy, all of that memory.
"""

import gc

gc.freeze()
