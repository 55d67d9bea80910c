"""Set aside: messages that are out of the flow, and the counts of those that left it.

Here belongs what the forwarder and the receivers share: parked messages and their lanes, when they
are tried again, dead letters, the isolation of one message among its neighbours, what was dropped.
Who sets a message aside, and why, is decided by those who deliver it.
"""
