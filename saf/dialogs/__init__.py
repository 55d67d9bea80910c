"""Conversations: reliable, ordered, two-way exchange between services of different databases.

The ideas and the words are those of SQL Server Service Broker. Messages of a conversation travel
like all others, through outbox, forwarder and inbox; this package adds the conversation's two ends.

    dialog      sending, ending and failing, by the application at its end
    statements  what an end writes, and its states
    facts       the messages that an end takes from the other end, and its lineage
    arrival     the same for all messages that are received together
    endpoints   the rows of the ends, locked and written together
    monologs    what the subscribers of a monolog get when one end was set back
    set_back    what happens to a dialog when one end came back with less than it had
    assembly    where the fragments of a large body wait, and how it is read
    groups      related dialogs, in one hand at a time
    saga        a process over several dialogs, with a state and a timer
    waiting     a call that returns the next message
    passing     two joined dialogs: messages that arrive on one are sent on the other
    contracts   which types of messages exist, and who sends them
    conversations   the ends as operators see them
"""
