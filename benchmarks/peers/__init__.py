"""Side by side with what a user would pick instead: the same work, machine, run and durability.

Each peer is a module here, which its own Python runs too: it may import nothing of saf, and its
package only inside its functions. It has

    NAME, VERSION       as its users know it
    REQUIRES            what pip installs for it, pinned
    LACKS               what it does not do, for the table
    SHARE               the share of the messages that it gets: a slow one would take hours
    SEND                the statement that its send issues, for pgbench
    prepare(app)        its tables
    fill(app, count, size)          so many pending messages with bodies of so many bytes
    relay(app, mom, number)         move what is pending to the table `PLACE`, as one of `RELAYS`
"""

RELAYS = 2

PLACE = """
CREATE TABLE IF NOT EXISTS arrived (
    id bigint, key text, body bytea, at timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS arrived_batch (relay int, batch bigint, PRIMARY KEY (relay, batch));
TRUNCATE arrived, arrived_batch
"""
"""Where peers put what they move: narrower than an inbox, and without an index."""
