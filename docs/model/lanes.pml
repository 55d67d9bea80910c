/* Lanes: messages that the destination does not take yet are set aside, and released in order.
 *
 * Messages 1 and 3 are for a service that the destination knows only later, message 2 is for
 * another one. Two forwarders take the shard over from each other, and die, as in forwarding.pml;
 * a lost answer is asked for again. The destination stores in one transaction.
 *
 * Proven: nothing is lost, nothing is stored twice, the messages of the service are stored in their
 * order, whoever still owns the shard hears no false alarm, and it comes to an end, with nothing
 * left in the lane.
 */

#ifndef MESSAGES
#define MESSAGES 3
#endif
#ifndef TAKEOVERS
#define TAKEOVERS 3
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef EARLY
#define EARLY 1                 /* cycles that only try the lane, before the service is known */
#endif
#define FORWARDERS 2
#define BIT(n) (1 << (n))
#define UP_TO(n) ((1 << ((n) + 1)) - 2)
#define OF_SERVICE (BIT(1) | BIT(3))
#define LAST_OF(rows) ((rows) >= BIT(3) -> 3 : ((rows) >= BIT(2) -> 2 : 1))
#define NUMBER(n) (batch_of[n] * 8 + (n))
#define BATCH(mark) ((mark) / 8)

/* the source */
byte committed;
byte owner, epoch, batch, done, open, position;
bool is_open;
byte parked;                    /* the lane of the service */
byte of_this_batch;             /* of these: parked_at >= opened_at of the open batch */
byte batch_of[MESSAGES + 1];
byte acknowledged, acknowledged_lane;
byte takeovers = TAKEOVERS, faults = FAULTS, living = FORWARDERS;
byte early = EARLY;
#define OWNS (owner == me && epoch == mine)
#define SAME (OWNS && is_open && batch == in_hand)
#define FINISHED (done == MESSAGES && !is_open && parked == 0)
#define DIES atomic { living == FORWARDERS && takeovers > 0 -> living--; goto died }

/* the destination */
bool is_known;                  /* the service, by `saf service add` */
byte known_epoch, mark, mark_lane;
byte stored;
byte last_stored;               /* of the service */

mtype = { NOTHING, STORED, UNKNOWN, OLDER, AHEAD, BEHIND }

#ifdef NO_EPOCH_ON_REFUSAL      /* planted: who refuses a chunk does not remember who gave it */
#define REMEMBER skip
#else
#define REMEMBER known_epoch = mine
#endif
#ifdef OVERTAKE                 /* planted: new messages do not wait behind the lane */
#define HELD 0
#else
#define HELD (parked -> OF_SERVICE : 0)
#endif
#ifdef RELEASE_EARLY            /* planted: what the batch in hand has set aside is released */
#define RELEASABLE parked
#else
#define RELEASABLE (parked & ~(of_this_batch & ~UP_TO(at)))
#endif

inline put(n)
{
    assert(!(stored & BIT(n)));                             /* nothing twice */
    stored = stored | BIT(n);
    if
    :: (BIT(n) & OF_SERVICE) -> assert(n > last_stored); last_stored = n    /* order */
    :: else
    fi
}

/* `not_parked`: the mark may be that of a message that is still in its lane */
#define IS_PARKED(b) \
    ((parked & BIT(1)) && batch_of[1] == (b) || (parked & BIT(3)) && batch_of[3] == (b))

/* `PostgresInbox.store` for a chunk of one place, with its mark and the mark acknowledged */
inline store(rows, there, known)
{
    atomic {
        fresh = rows;
        n = 1;
        do
        :: n <= MESSAGES ->
            if :: NUMBER(n) <= there -> fresh = fresh & ~BIT(n) :: else fi;
            n++
        :: else -> break
        od;
        if
        :: known_epoch > mine -> what = OLDER
        :: else ->
            if
            :: there < known -> what = BEHIND
            :: there != 0 && there > known &&
               BATCH(there) != in_hand && !IS_PARKED(BATCH(there)) -> what = AHEAD
            :: else ->
                if
                :: (fresh & OF_SERVICE) && (!is_known || (fresh & behind)) ->
                    what = UNKNOWN; REMEMBER
                :: else ->
                    what = STORED; known_epoch = mine;
                    n = 1;
                    do
                    :: n <= MESSAGES -> if :: (fresh & BIT(n)) -> put(n) :: else fi; n++
                    :: else -> break
                    od;
                    if
                    :: rows && NUMBER(LAST_OF(rows)) > there -> there = NUMBER(LAST_OF(rows))
                    :: else
                    fi
                fi
            fi
        fi;
        n = 0
    }
}

/* `SetAside.write` and `parking.known`: what is there is not written again */
#define PARK of_this_batch = of_this_batch | (aside & ~parked); parked = parked | aside; aside = 0

#ifdef NO_WRITE_AHEAD           /* planted: it is written with the position, after the storing */
#define WRITE_AHEAD skip
#else
#define WRITE_AHEAD \
    atomic { if :: !SAME -> goto outside :: else -> PARK fi }   /* SetAside.write_ahead */
#endif

proctype Environment()
{
    do
    :: committed < MESSAGES -> committed++
    :: !is_known -> is_known = true
    :: committed == MESSAGES && is_known -> break
    od
}

proctype Forwarder(byte me)
{
    byte mine, in_hand, end, at, to, rows, aside, earlier, behind, fresh, n;
    bool tried;
    mtype what = NOTHING;

outside:
    atomic {
        rows = 0; aside = 0; earlier = 0; behind = 0; fresh = 0; tried = false; what = NOTHING;
        mine = 0; in_hand = 0; end = 0; at = 0; to = 0
    }
    if
    :: atomic {
           owner != me && takeovers > 0 && !FINISHED ->
           takeovers--; owner = me; epoch++; mine = epoch
       }
    :: owner != me && takeovers == 0 -> goto gone
    :: FINISHED -> goto gone
    fi;

cycle:
    atomic {
        rows = 0; aside = 0; earlier = 0; behind = 0; fresh = 0; tried = false; what = NOTHING;
        in_hand = 0; end = 0; at = 0; to = 0
    }
    if
    :: !OWNS -> goto outside
    :: OWNS && FINISHED -> goto gone
    :: atomic {
           OWNS && is_open -> in_hand = batch; end = open; at = (position > done -> position : done)
       }
    :: atomic {
           OWNS && !is_open && (committed > done || parked && (is_known || early > 0)) ->
           if :: committed == done && !is_known -> early-- :: else fi;
           batch++; is_open = true; open = committed; position = 0; of_this_batch = 0;
           n = done + 1;
           do
           :: n <= open -> batch_of[n] = batch; n++
           :: else -> break
           od;
           n = 0; in_hand = batch; end = open; at = done
       }
    :: DIES
    fi;
    earlier = parked & ~UP_TO(at);                          /* EarlierTask.look */

lane:                                                       /* Releasing._release */
    if
    :: tried || RELEASABLE == 0 -> goto new
    :: !tried && at < end -> goto new                       /* its time has not come */
    :: atomic { !tried && RELEASABLE -> rows = RELEASABLE }
    fi;
    tried = true;
release:
    store(rows, mark_lane, acknowledged_lane);
    if
    :: what == STORED ->
        atomic {                                            /* ParkedLanes.settle */
            if
            :: !SAME -> goto outside
            :: else ->
                assert((rows & ~stored) == 0);                  /* nothing lost */
                parked = parked & ~rows; of_this_batch = of_this_batch & ~rows;
                acknowledged_lane = mark_lane
            fi
        }
    :: what == STORED && faults > 0 -> faults--; goto release   /* the answer got lost */
    :: what == UNKNOWN                                      /* it waits for its next attempt */
    :: what == OLDER -> assert(!OWNS); goto outside         /* only who was taken over is fenced */
    :: what == AHEAD || what == BEHIND -> assert(!OWNS); goto outside   /* no false alarm */
    :: DIES
    fi;

new:
    atomic { rows = 0; aside = 0; behind = 0; fresh = 0; what = NOTHING; to = 0 }
    if
    :: at == end -> goto close
    :: atomic { at < end -> to = end }
    :: atomic { at + 1 < end -> to = at + 1 }
    :: DIES
    fi;
    atomic {                                                /* Context.look, parts.split */
        rows = UP_TO(to) & ~UP_TO(at) & ~earlier;
        behind = HELD;
        aside = rows & behind;
        rows = rows & ~behind
    }
main:                                                       /* Storing.deliver */
    if
    :: rows == 0 -> goto settle
    :: rows && aside -> WRITE_AHEAD
    :: rows && !aside
    fi;
again:
    store(rows, mark, acknowledged);
    if
    :: what == STORED -> goto settle
    :: what == STORED && faults > 0 -> faults--; goto again
    :: what == UNKNOWN ->                                   /* Storing._divert */
        atomic {
            aside = fresh & OF_SERVICE; behind = OF_SERVICE; rows = fresh & ~OF_SERVICE;
            goto main
        }
    :: what == OLDER -> assert(!OWNS); goto outside         /* only who was taken over is fenced */
    :: what == AHEAD || what == BEHIND -> assert(!OWNS); goto outside   /* no false alarm */
    :: DIES
    fi;

settle:
    atomic {                                                /* Task._settle */
        if
        :: !SAME -> goto outside
        :: else ->
            PARK;
            n = at + 1;
            do
            :: n <= to -> assert((stored | parked) & BIT(n)); n++       /* nothing lost */
            :: else -> break
            od;
            n = 0; position = to; at = to; rows = 0; acknowledged = mark
        fi
    }
    goto new;

close:
    atomic {
        if
        :: !SAME -> goto outside
        :: else -> done = end; is_open = false; position = 0; of_this_batch = 0
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
    atomic { run Environment(); run Forwarder(1); run Forwarder(2) }
    living == 0 ->
    assert(FINISHED)                                        /* nothing is left */
}
