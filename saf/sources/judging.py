"""Judging: whether a partition still has what its mark says, so that reading may continue.

The function is pure. A mark is a position, with the number of messages up to it as the partition's
broker counts them. The broker's own count is what reveals a topic that was made again: its new
messages may have higher positions than the old ones.
"""

from __future__ import annotations

from saf.errors import RetentionPassed, SafError, SourceSetBack, TopicMadeAgain
from saf.sources import BEGINNING, Extent, Progress


def judge(name: str, topic: str, progress: Progress, extent: Extent) -> SafError | None:
    """Return why a partition must not be read from its mark; None if it may be.

    >>> def judged(mark, read, known=None, **extent):
    ...     progress = Progress(shard=0, position=mark, added=read, topic_id=known)
    ...     error = judge("payments", "t", progress, Extent(**extent))
    ...     return type(error).__name__
    >>> judged((0, 5), 5, last=(0, 9), first=(0, 1), added=9, removed=0)
    'NoneType'

    The topic ends before the mark, or is gone:

    >>> judged((0, 5), 5, last=(0, 4), first=(0, 1), added=4, removed=0)
    'SourceSetBack'
    >>> judged((0, 5), 5, last=(0, 0), first=None, added=0, removed=0, exists=False)
    'TopicMadeAgain'

    Its messages after the mark were removed before they were read:

    >>> judged((0, 5), 5, last=(0, 9), first=(0, 6), added=9, removed=5)
    'NoneType'
    >>> judged((0, 5), 5, last=(0, 9), first=(0, 7), added=9, removed=6)
    'RetentionPassed'

    It is another topic of that name, which has had fewer messages, or lacks none:

    >>> judged((0, 5), 5, last=(7, 2), first=(7, 1), added=2, removed=0)
    'TopicMadeAgain'
    >>> judged((0, 5), 5, last=(7, 9), first=(7, 1), added=9, removed=0)
    'TopicMadeAgain'

    Or it has another id:

    >>> judged((0, 5), 5, "a", last=(0, 9), first=(0, 1), added=9, removed=0, topic_id="b")
    'TopicMadeAgain'
    """
    if progress.position > BEGINNING and not extent.exists:
        return TopicMadeAgain(name, topic, "it does not exist")
    if None not in (progress.topic_id, extent.topic_id) and progress.topic_id != extent.topic_id:
        how = f"its id was {progress.topic_id}, and is {extent.topic_id}"
        return TopicMadeAgain(name, topic, how)
    if extent.waiting is not None:
        return None  # without places, nothing can be compared
    if extent.last < progress.position:
        return SourceSetBack(name, topic, progress.shard, progress.position, extent.last)
    return None if progress.added is None else _counted(name, topic, progress, extent)


def _counted(name: str, topic: str, progress: Progress, extent: Extent) -> SafError | None:
    """Return why a partition must not be read, by the numbers of its messages."""
    read = progress.added or 0
    if extent.added < read:
        how = f"{read:,} messages of shard {progress.shard} were read, it has had {extent.added:,}"
        return TopicMadeAgain(name, topic, how)
    if extent.first is not None and extent.first <= progress.position:
        return None
    # the mark's own message is removed, and so are all before it
    if extent.removed < read:
        how = f"{read:,} messages of shard {progress.shard} were read, but fewer were removed"
        return TopicMadeAgain(name, topic, how)
    if extent.removed > read:
        return RetentionPassed(name, topic, progress.shard, extent.removed - read)
    return None
