"""The soak: the whole system at a steady rate for hours, to learn what grows.

    make soak HOURS=8

Everything is on, each in a process of its own: an application that sends 500 messages a second,
``saf forward --loop`` from it to a MOM store and to streams of Redis and back, a worker,
processors, both ends of dialogs, a dispatcher to an endpoint that fails now and then, purges,
``saf metrics``, and ``saf ui`` with a visitor.

It goes in pieces. SIGINT and SIGTERM end a piece, and the same command goes on in the same folder
until it has its hours. A piece ends with a check: each message came to its end, once and in the
order of its key (`tests.soak.ledger`). Every few seconds a sample is taken (`tests.soak.sampler`),
and what grows over hours is named (`tests.soak.flatness`).
"""
