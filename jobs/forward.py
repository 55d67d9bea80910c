"""The forwarder for spark-submit: the same command as ``saf forward``, with the same options.

    spark-submit --master spark://host:7077 jobs/forward.py --config saf.toml --json

The driver and the executors need the package ``saf-outbox[forwarder]`` installed.
"""

from __future__ import annotations

import sys

from saf.cli import main

if __name__ == "__main__":
    main(["forward", *sys.argv[1:]])
