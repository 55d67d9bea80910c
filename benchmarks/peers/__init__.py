"""Side by side with what a user would pick instead: the same work, machine, run and durability.

Each system is a module here, which its own Python runs too: a peer's may import nothing of saf,
and its package only inside its functions. It has

    NAME, VERSION       as its users know it
    REQUIRES            what pip installs for it, pinned
    LACKS               what it does not do, for the page
    CANNOT              the workloads that it has nothing for, and why
    SHARE               the share of the messages that it gets: a slow one would take hours
    RELAYS, WARM_UP     how many processes relay; the rounds before what is hot is compiled
    TABLES              what holds its messages, as patterns
    ARRIVED             the table where they arrive, if it is not the peers'
    SEND                the statement that its send issues, for pgbench
    prepare(app)        its tables
    empty(connection)   nothing pending
    add(connection, count, size)    so many more messages with bodies of so many bytes
    mark(connection)    what marks all that is pending as done; what it must know, it finds first
    relay(app, mom, number, go_on)  move what is pending, as one of its relays. When nothing is,
                        ``go_on()`` waits a little, and says whether to look again
"""

ARRIVED = "arrived"
PLACE = """
CREATE TABLE IF NOT EXISTS arrived (
    id bigint, key text, body bytea, at timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS arrived_batch (relay int, batch bigint, PRIMARY KEY (relay, batch));
TRUNCATE arrived, arrived_batch, saf.inbox, saf.watermark
"""
"""Where peers put what they move: narrower than an inbox, and without an index."""

BODY = "rpad(extract(epoch FROM clock_timestamp()) || ' ', %s, 'x')"
"""A text of so many characters that begins with when it was written."""
