"""Captures: a table's changes as messages, sent by a trigger that an operator has reviewed.

    saf capture add orders --service billing --key number --columns number,total

`table` reads what the catalog knows of a table, `code` writes the SQL of a capture, `stored` adds,
changes, lists and removes captures, `drift` compares them with the catalog, and `backfill` sends
the rows that exist already.

*Why statement triggers with transition tables.* One call of the function per statement sends all
its rows by one INSERT. A trigger needs no replication slot and no superuser, and its messages are
part of the transaction that changes the rows.

*Order.* Writers of a row lock it until they end. The trigger fires at the end of the statement,
under that lock, and draws the ids of its messages then. So messages of a row have rising ids in the
order of its changes, whoever makes them. An update that changes the primary key, or the column that
is the key of messages, sends a delete with the old key and an insert with the new one; deletes come
first, so that a key that one row leaves and another takes ends with the insert.

*Limits.* If a trigger of the application changes rows again that its statement has changed, the
inner statement's messages come first, because its trigger fires first; `stored.Review.others` lists
such triggers. The triggers of a MERGE fire in the order insert, update, delete: a MERGE that gives
a primary key that it deletes to another row sends the insert first.

*Rights.* The function runs with the rights of the owner of ``saf.outbox``, so those who write to
the table need no right in schema saf. Its search_path is pinned, nobody may call it, and functions
that the condition calls must belong to that owner or to a superuser, because others could change
them and so act as the owner.
"""
