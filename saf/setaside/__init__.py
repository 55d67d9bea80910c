"""Set aside: messages that are out of the flow, and the counts of those that left it.

The forwarder and the receivers share what is here: parked messages and their lanes, when these are
tried again, dead letters, the isolation of one message among its neighbours, and the counts of
dropped messages. Those who deliver a message decide whether it is set aside, and why.
"""
