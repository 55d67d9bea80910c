"""Conversations: reliable, ordered, two-way exchange between services of different databases.

The ideas and the words are those of SQL Server Service Broker. Messages of a conversation travel
as all others do, through outbox, forwarder and inbox; what is added here are its two ends.

    states      what an end is ready for
    dialog      what an application says on its end
    facts       what an end takes of what the other one says
    arrival     the same for all messages that are received together
    endpoints   the rows of the ends, locked and written together
    lineage     which incarnation of its broker has said what of an end
    comparing   what an end says of where it stands, and what a repair makes all ends say
    monologs    what the subscribers of a monolog get when one end was set back
    set_back    what becomes of a dialog whose one end came back with less than it had
    fragments   how a large body travels
    assembly    where its fragments wait, and how it is read
    groups      related dialogs, in one hand at a time
    passing     two dialogs, of which one goes on where the other one has come to
    contracts   which types of messages there are, and who sends them
    conversations   the ends as people look at them
"""
