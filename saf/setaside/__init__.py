"""Set aside: messages that are out of the flow, and counts of those that left it.

This package has what the forwarder and the receivers share: parked messages and their lanes, their
next attempts, dead letters, the isolation of one message among its neighbours, and the counts of
dropped messages. The code that delivers a message decides whether it is set aside, and why.
"""
