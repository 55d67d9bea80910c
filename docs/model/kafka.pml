/* Kafka: who may end a transaction for a shard, if forwarders have transactions of several names.
 *
 * A forwarder's transactions have the name of the lowest shard that it has in hand. The first one
 * has shards 1 and 2, at the epoch 1; the second one has taken over shard 2, at the epoch 2, so it
 * has another name; the third one has both again, at the epoch 3. All have the same message of
 * shard 2 in hand, and each goes on however late. Kafka compares nothing: it fences by name only.
 * What they know of each other is in the log of the marks (saf.destinations.kafka.server).
 *
 * Proven: the message is stored once, and after a newer owner has stored, an older one stores
 * nothing.
 */

#ifndef OWNERS
#define OWNERS 3
#endif
#ifndef TURNS
#define TURNS 4                 /* so often an owner looks whether the shards are its own */
#endif
#define SHARDS 2
#define NAMES 2
#define LONGEST 32
#define BIT(n) (1 << (n))
#define NAME(of) ((of) == 2 -> 2 : 1)                       /* of the lowest shard in hand */
#define HAS(of, shard) ((shard) == 2 || (of) != 2)

byte producer[NAMES + 1];       /* which client of a name is the last one */

/* the topic of the marks, as far as transactions have ended */
mtype = { CLAIM, MARK }
mtype kind[LONGEST];
byte shard_of[LONGEST], said[LONGEST];                      /* a claim: a name; a mark: an epoch */
byte length;

byte stored, newest_stored;

inline append(what, which, value)
{
    assert(length < LONGEST);                               /* the model's log is long enough */
    kind[length] = what; shard_of[length] = which; said[length] = value;
    length++
}

/* `MarksTopic.read`, to the end: nobody gets past a transaction that is open, so who has fenced
 * others reads all that they have ended */
inline read_marks()
{
    do
    :: reached < length ->
        if
        :: kind[reached] == CLAIM ->
            last_claim[shard_of[reached]] = said[reached];
            named[shard_of[reached]] = named[shard_of[reached]] | BIT(said[reached])
        :: else -> mark_epoch = said[reached]
        fi;
        reached++
    :: else -> break
    od
}

#define NOT_CLAIMED(shard) (HAS(me, shard) && last_claim[shard] != NAME(me))
#define OTHERS(shard) (HAS(me, shard) -> named[shard] & ~BIT(NAME(me)) : 0)

#ifdef NO_CLAIM                 /* planted: who stores does not say so in the log */
#define MISSING false
#else
#define MISSING (NOT_CLAIMED(1) || NOT_CLAIMED(2))
#endif
#ifdef NO_FENCING               /* planted: claims are read, and nobody is fenced */
#define FENCE(name) skip
#else
#define FENCE(name) producer[name]++
#endif
#ifdef FENCE_BEFORE_CLAIM       /* planted: who comes later in the log may not know of it */
#define FENCES_FIRST true
#else
#define FENCES_FIRST false
#endif
#ifdef READ_BEFORE_FENCING      /* planted: the marks are read, and then others are fenced */
#define READ_EARLIER atomic { read_marks() }
#define READ_LATER skip
#else
#define READ_EARLIER skip
#define READ_LATER atomic { read_marks() }
#endif

proctype Owner(byte me)
{
    byte client, turns, reached, mark_epoch;
    byte last_claim[SHARDS + 1], named[SHARDS + 1];
    bool is_read;

marks:                                                      /* Transactions._marks */
    if
    :: mark_epoch > me -> goto gone                         /* Fenced */
    :: mark_epoch == me -> goto gone                        /* it is stored */
    :: mark_epoch < me && is_read && !MISSING && !(OTHERS(1) | OTHERS(2)) -> goto store
    :: mark_epoch < me && !(is_read && !MISSING && !(OTHERS(1) | OTHERS(2)))
    fi;
    if
    :: turns == TURNS -> goto gone                          /* Unavailable */
    :: turns < TURNS -> turns++
    fi;
    if
    :: client == 0 ->                                       /* _begin_as */
        atomic { producer[NAME(me)]++; client = producer[NAME(me)] }
    :: client != 0
    fi;
    if
    :: FENCES_FIRST && (OTHERS(1) | OTHERS(2)) -> goto fence
    :: !FENCES_FIRST || !(OTHERS(1) | OTHERS(2))
    fi;
claim:
    if
    :: MISSING ->
        atomic {                                            /* _claim: a transaction */
            if
            :: producer[NAME(me)] == client ->
                if :: NOT_CLAIMED(1) -> append(CLAIM, 1, NAME(me)) :: else fi;
                if :: NOT_CLAIMED(2) -> append(CLAIM, 2, NAME(me)) :: else fi;
                if :: FENCES_FIRST -> read_marks() :: else fi
            :: else -> client = 0; goto marks
            fi
        }
    :: !MISSING
    fi;
fence:
    READ_EARLIER;
    if
    :: OTHERS(1) | OTHERS(2) ->
        FENCE(3 - NAME(me));
        atomic {                                            /* MarksTopic.fenced */
            named[1] = named[1] & ~BIT(3 - NAME(me));
            named[2] = named[2] & ~BIT(3 - NAME(me))
        }
    :: !(OTHERS(1) | OTHERS(2))
    fi;
    READ_LATER;
    is_read = true;
    goto marks;

store:                                                      /* _ended: messages and marks */
    atomic {
        if
        :: producer[NAME(me)] == client ->
            assert(me >= newest_stored);                    /* fenced */
            newest_stored = me;
            if
            :: mark_epoch == 0 -> assert(stored == 0); stored++     /* nothing twice */
            :: mark_epoch != 0                              /* it is there, and is dropped */
            fi;
            append(MARK, 2, me)
        :: else -> client = 0; is_read = false; goto marks
        fi
    }

gone:
    skip
}

init
{
    atomic {
        byte owner = 1;
        do
        :: owner <= OWNERS -> run Owner(owner); owner++
        :: else -> break
        od
    }
}
