/* Forwarding: one shard, from its source to a destination, by forwarders that overtake each other.
 *
 * Each forwarder takes the shard over whenever it likes: no lease is trusted. One that was taken
 * over goes on as if nothing had happened, however much later; and one may die, anywhere. What it
 * has sent may be done at the destination after it has given up. KIND says how the destination
 * keeps its mark, QUALITY what the route promises.
 *
 * Proven: what is complete at the source was stored, is parked or is a dead letter; nothing is
 * stored twice; everything is stored in its order; after a newer owner has stored, an older one
 * stores nothing; nobody who still owns the shard is told that one side was set back; and it comes
 * to an end, with nothing left.
 */

#ifndef KIND
#define KIND POSTGRESQL
#endif
#ifndef QUALITY
#define QUALITY EXACTLY_ONCE
#endif
#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef TAKEOVERS
#define TAKEOVERS 3       /* the first owner's is one of them */
#endif
#ifndef FAULTS
#define FAULTS 1          /* how often somebody waits no longer for an answer */
#endif
#ifndef MOVES
#define MOVES 2           /* how often who was taken over still has others begin anew */
#endif
#define FORWARDERS 2

#define BIT(n) (1 << (n))
#define UP_TO(n) ((1 << ((n) + 1)) - 2)
#define FIRST_OF(rows) ((rows) & -(rows))
#define LAST_OF(rows) \
    ((rows) >= BIT(4) -> 4 : ((rows) >= BIT(3) -> 3 : ((rows) >= BIT(2) -> 2 : 1)))
#define FIRST_ONE(rows) \
    ((rows) & BIT(1) -> 1 : ((rows) & BIT(2) -> 2 : ((rows) & BIT(3) -> 3 : 4)))
#define NUMBER(batch, position) ((batch) * 8 + (position))
#define BATCH(mark) ((mark) / 8)

/* the source: saf.cursor, saf.acknowledged, saf.parked, saf.dead_letter */
byte committed;           /* messages 1 to this one; log.pml is about how they become a batch */
byte owner, epoch;
byte batch, done, open, position, attempted;
bool is_open;
byte acknowledged;        /* a mark */
byte parked, dead;        /* messages, as bits */
byte batch_of[MESSAGES + 1];
byte takeovers = TAKEOVERS, faults = FAULTS, living = FORWARDERS;

#include "destination.pml"

#define OWNS (owner == me && epoch == mine)
#ifdef NO_FENCE                 /* planted: the source does not look at owner and epoch */
#define MINE true
#else
#define MINE OWNS
#endif
#define SAME (MINE && is_open && batch == in_hand)      /* saf.log.cursor.SAME */
#ifdef OVERTAKE                 /* planted: new messages do not wait behind parked ones */
#define HOLD skip
#else
#define HOLD held = true
#endif
#define FINISHED (done == MESSAGES && !is_open && parked == 0)

#ifdef NEW_NAME                 /* planted: each client has transactions of a name of its own */
#define BEGIN_TRANSACTIONS read = producer
#else
#define BEGIN_TRANSACTIONS atomic { producer++; read = producer }
#endif
#ifdef READ_FIRST               /* planted: the marks are read, and then others are fenced */
#define READ_TOO_EARLY atomic { there = mark; newest = known_epoch }
#define READ_MARKS skip
#else
#define READ_TOO_EARLY skip
#define READ_MARKS atomic { there = mark; newest = known_epoch }
#endif

/* it dies only where somebody is left who takes over */
#define DIES atomic { living == FORWARDERS && takeovers > 0 -> living--; goto died }

#define ENDED(n) (stored[n] > 0 || (parked & BIT(n)) || (dead & BIT(n)))
inline nothing_is_lost(first, last)
{
    row = first;
    do
    :: row <= last -> assert(ENDED(row)); row++            /* nothing lost */
    :: else -> break
    od;
    row = 0
}

proctype Writer()
{
    do
    :: committed < MESSAGES -> committed++
    :: else -> break
    od
}

proctype Forwarder(byte me)
{
    byte mine, in_hand, end, at, to, rows, buried, before, row, requests, moves;
    byte known;                 /* the mark that the source remembers */
    byte there, read, newest;   /* what it has read of the marks at the destination */
    bool has_asked, held, released, from_lane;

outside:
    atomic {
        has_asked = false; held = false; from_lane = false; released = false;
        in_hand = 0; end = 0; at = 0; to = 0; rows = 0; buried = 0; before = 0; known = 0;
        there = 0; read = 0; newest = 0; mine = 0; moves = 0
    }
    if
    :: atomic {                                             /* Member.balance: ACQUIRE */
           owner != me && takeovers > 0 && !FINISHED ->
           takeovers--; owner = me; epoch++; mine = epoch
       }
    :: owner != me && takeovers == 0 -> goto gone
    :: FINISHED -> goto gone
    fi;

cycle:                                                      /* SourceBroker.open_work */
    atomic { has_asked = false; held = false; from_lane = false; released = false;
             rows = 0; buried = 0; there = 0; read = 0; newest = 0; known = 0; before = 0 }
    if
    :: !MINE -> goto outside
    :: MINE && FINISHED -> goto gone
    :: atomic {                                             /* a batch in hand: OWNED */
           MINE && is_open ->
           in_hand = batch; end = open; at = (position > done -> position : done)
       }
    :: atomic {                                             /* OPEN */
           MINE && !is_open && (committed > done || parked) ->
           batch++; is_open = true; open = committed; position = 0; attempted = 0;
           row = done + 1;
           do
           :: row <= open -> batch_of[row] = batch; row++
           :: else -> break
           od;
           row = 0;
           in_hand = batch; end = open; at = done
       }
    :: DIES
    fi;

lane:                                                       /* Releasing.release_all */
    if
    :: parked == 0 || released -> goto new
    :: parked && !released && at < end -> HOLD; goto new    /* its time has not come */
    :: atomic { parked && !released -> rows = parked }
    :: atomic { parked && !released -> rows = FIRST_OF(parked) }  /* a chunk may be small */
    fi;
    from_lane = true;
    goto deliver;

new:                                                        /* Task._forward */
    from_lane = false;
    if
    :: at == end -> goto close
    :: atomic { at < end -> to = end }
    :: atomic { at + 1 < end -> to = at + 1 }
    :: DIES
    fi;
    atomic { rows = UP_TO(to) & ~UP_TO(at); buried = 0 }
    if
    :: held -> goto park                                    /* Task._waits */
    :: !held
    fi;
#ifdef MARK_FIRST               /* planted: marked as forwarded, then stored */
    atomic { if :: !SAME -> goto outside :: else -> position = to fi };
#endif
#if QUALITY == AT_MOST_ONCE
    atomic {                                                /* EarlierTask.unattempted, attempt */
        if
        :: !SAME -> goto outside
        :: else
        fi;
        if :: !has_asked -> before = attempted :: else fi;
        buried = rows & UP_TO(before);
        rows = rows & ~buried;
        if
        :: rows -> dead = dead | buried; buried = 0;
            if :: to > attempted -> attempted = to :: else fi
        :: else
        fi;
        has_asked = true
    }
    if
    :: rows == 0 -> goto settle
    :: else
    fi;
#endif

deliver:                                                    /* DestinationSessions.store */
    if
    :: !has_asked || QUALITY == AT_MOST_ONCE -> known = acknowledged; has_asked = true
    :: else
    fi;

ask:
#if KIND == KAFKA               /* Transactions._marks: fence whoever had the name, then read */
    READ_TOO_EARLY;
    if
    :: read == 0 -> BEGIN_TRANSACTIONS
    :: else                                                 /* it has begun them before */
    fi;
    READ_MARKS;
#elif KIND == RABBITMQ_STREAM   /* Journal.follow and Journal.marks */
    atomic {
        there = mark; newest = known_epoch;
        if :: begun_epoch > newest -> newest = begun_epoch :: else fi;
        if :: begun > mark && BATCH(published) >= BATCH(begun) -> there = begun :: else fi
    }
#elif KIND != POSTGRESQL        /* Stepwise._marks, Table._places */
    atomic { there = mark; newest = known_epoch; read = version };
#endif
#if KIND != POSTGRESQL
    atomic {
        answered[me] = there;
        answer[me] = VERDICT(newest, there, mine, known, in_hand)
    }
    if
    :: answer[me] != STORED -> goto told
    :: else
    fi;
    atomic {                                                /* places.beyond */
        before = rows;
        row = 1;
        do
        :: row <= MESSAGES ->
            if :: IS_THERE(row, there) -> rows = rows & ~BIT(row) :: else fi;
            row++
        :: else -> break
        od;
        row = 0
    }
#if KIND == RABBITMQ_STREAM
    atomic {                                                /* Journal.begin */
        if
        :: rows && NUMBER(batch_of[FIRST_ONE(rows)], 0) >= begun ->
            begun = NUMBER(batch_of[FIRST_ONE(rows)], 0); begun_epoch = mine
        :: else
        fi
    }
#endif
#endif
    atomic {
        requests++; asked[me] = requests; answer[me] = NOTHING;
        run Request(me, requests, mine, in_hand, rows, known, read);
    }
    if
    :: answer[me] != NOTHING
    :: atomic { faults > 0 -> faults--; asked[me] = 0; answer[me] = NOTHING; goto unavailable }
    :: DIES
    fi;
#if KIND != POSTGRESQL
    rows = before;                                          /* what is there counts as stored */
#endif
#if KIND == RABBITMQ_STREAM
    atomic {                                                /* Journal.move: marks only rise */
        mark = AFTER(mark, rows);
        if :: mine > known_epoch -> known_epoch = mine :: else fi;
        answered[me] = AFTER(there, rows)
    }
#endif

told:
    if
    :: answer[me] == STORED -> known = answered[me]; goto settle
    :: answer[me] == MOVED && (OWNS || moves < MOVES) ->    /* the marks are read anew */
        read = 0;
        if :: OWNS :: !OWNS -> moves++ fi;
        goto ask
    :: answer[me] == MOVED && !OWNS && moves == MOVES -> goto outside
    :: answer[me] == OLDER -> assert(!OWNS); goto outside  /* only who was taken over is fenced */
    :: answer[me] == BEHIND -> assert(!OWNS); goto outside  /* no false alarm */
    :: answer[me] == AHEAD ->
        atomic {                                            /* not_parked */
            row = MESSAGES;
            do
            :: row > 0 && !((parked & BIT(row)) && batch_of[row] == BATCH(answered[me])) -> row--
            :: else -> break
            od;
            if
            :: row > 0 -> row = 0; known = answered[me]
            :: else -> assert(!OWNS); goto outside          /* no false alarm */
            fi
        }
        goto ask
    fi;

unavailable:
#if KIND != POSTGRESQL
    rows = before; read = 0;                                /* the client is thrown away */
#endif
#if QUALITY == AT_MOST_ONCE     /* storing.next_step */
    atomic { buried = buried | rows; rows = 0 };
    goto settle;
#endif
    if
    :: true -> goto ask                                     /* while_unavailable */
    :: from_lane -> HOLD; goto new                          /* ParkedLanes.postpone */
    :: !from_lane -> goto cycle                             /* Task._stay_open */
    :: !from_lane -> HOLD                                   /* SetAside.wait */
    fi;

park:
    atomic {                                                /* SetAside.write, with the position */
        if
        :: !SAME -> goto outside
        :: else ->
            parked = parked | rows;
            nothing_is_lost(at + 1, to);
            position = to; at = to; rows = 0
        fi
    }
    goto new;

settle:                                                     /* Task._settle, ParkedLanes.settle */
    atomic {
        if
        :: !SAME -> goto outside
        :: SAME && from_lane ->
            parked = parked & ~rows; acknowledged = known; rows = 0;
            nothing_is_lost(1, at)
        :: SAME && !from_lane ->
            dead = dead | buried; buried = 0;
            nothing_is_lost(at + 1, to);
            position = to; at = to; rows = 0;
            if :: QUALITY != AT_MOST_ONCE && has_asked -> acknowledged = known :: else fi
        fi
    }
    if
    :: from_lane && parked -> goto lane
    :: from_lane && !parked -> released = true; goto new
    :: !from_lane -> goto new
    :: DIES
    fi;

close:                                                      /* cursor.close */
    atomic {
        if
        :: !SAME -> goto outside
        :: else -> done = end; is_open = false; position = 0; attempted = 0
        fi
    }
    goto cycle;

gone:
    living--;
died:
    skip
}

init
{
    atomic {
        run Writer(); run Forwarder(1); run Forwarder(2);
#if KIND == ICEBERG
        run Others()
#endif
    }
    living == 0 ->
    assert(FINISHED)                                        /* nothing is left */
}
