"""Conversations: reliable, ordered, two-way exchange between services of different databases.

The ideas and the words are those of SQL Server Service Broker. Messages of a conversation travel
like all others, through outbox, forwarder and inbox; this package adds the conversation's two ends.

    states      the states of an end
    dialog      sending, ending and failing, by the application at its end
    facts       the messages that an end takes from the other end
    arrival     the same for all messages that are received together
    endpoints   the rows of the ends, locked and written together
    lineage     which incarnation of its broker has sent which of an end's numbers
    comparing   how ends tell each other their progress, and how a repair makes all ends compare
    monologs    what the subscribers of a monolog get when one end was set back
    set_back    what happens to a dialog when one end came back with less than it had
    fragments   how a large body travels
    assembly    where its fragments wait, and how it is read
    groups      related dialogs, in one hand at a time
    passing     two joined dialogs: messages that arrive on one are sent on the other
    contracts   which types of messages exist, and who sends them
    conversations   the ends as operators see them
"""
