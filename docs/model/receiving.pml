/* Receiving: the messages of one shard of an inbox, by receivers that read ahead and die.
 *
 * A receiver locks the shard's cursor, or takes what it has prefetched if the cursor is still where
 * that begins. It handles the messages, and moves the position in the transaction of the handling.
 * It may die in the middle of it, and another one is started. Nobody survives the POISON. With
 * MEMBERS the shard has an owner, which changes meanwhile. An attempt that was counted is made, or
 * its process has died, before the time of the lane comes again: who stands still for longer than
 * a lane waits may make a message a dead letter that it did not try.
 *
 * Proven: each message is handled exactly once, in its order, and by the shard's owner; the poison
 * alone becomes a dead letter; and it comes to an end, with nothing left.
 */

#ifndef MESSAGES
#define MESSAGES 3        /* of one key */
#endif
#ifndef DEATHS
#define DEATHS 1          /* besides those that the poison makes */
#endif
#ifndef POISON
#define POISON 2          /* a message that ends each process that handles it; 0: none */
#endif
#ifdef MEMBERS
#define CHANGES 2         /* of the owner */
#define IS_MINE (owner == me)
#else
#define CHANGES 0
#define IS_MINE true
#endif
#define RECEIVERS 2
#define ATTEMPTS 3        /* Policy.max_attempts */
#define LIVES (DEATHS + ATTEMPTS + 2)
#define BIT(n) (1 << (n))
#define BETWEEN(after, last) (((1 << ((last) + 1)) - 1) & ~((1 << ((after) + 1)) - 1))
#define FIRST_OF(rows) \
    ((rows) & BIT(1) -> 1 : ((rows) & BIT(2) -> 2 : ((rows) & BIT(3) -> 3 : 4)))

byte committed;           /* messages 1 to this one */

/* the shard's row of saf.cursor */
byte locked_by;           /* of whom a transaction holds it */
bool failed;              /* the xmax is of a transaction that did not commit */
bool careful;             /* allowance is not null */
byte owner = 1, epoch;
byte batch, done, open, position;
bool is_open;

/* the lane of the key: saf.parked, saf.backoff */
byte parked, attempts;
byte trying;              /* who has counted an attempt, and has neither made it nor died */

byte handled, dead, last_handled;
byte lives = LIVES, deaths = DEATHS, changes = CHANGES, living = RECEIVERS;

#define FINISHED (done == MESSAGES && !is_open && parked == 0)
#define PLACE (is_open -> (position > done -> position : done) : done)
#define SOMETHING_NEW (is_open || committed > done)

#ifdef NO_LOCK                  /* planted: a claim takes shards that somebody has in hand */
#define IS_FREE true
#define HAS_IT true
#else
#define IS_FREE (locked_by == 0)
#define HAS_IT (locked_by == me)
#endif
#ifdef NO_TRACE                 /* planted: a delivery that did not come to its end leaves no trace */
#define LEAVE_TRACE skip
#else
#define LEAVE_TRACE failed = true
#endif
#if defined(TAKE_BLIND)         /* planted: what was prefetched is taken wherever the cursor is */
#define IS_THERE (batch == its_batch && epoch == its_epoch)
#elif defined(TAKE_ANY_OWNER)   /* planted: the epoch and the owner are not compared */
#define IS_THERE (batch == its_batch && PLACE == its_place)
#define IS_MINE_STILL true
#else
#define IS_THERE (batch == its_batch && PLACE == its_place && epoch == its_epoch)
#endif
#ifndef IS_MINE_STILL
#define IS_MINE_STILL IS_MINE
#endif

#ifdef COUNT_LATER              /* planted: an attempt is counted when it has failed, not before */
#define COUNT_BEFORE attempts = (attempts -> attempts : 1)
#else
#define COUNT_BEFORE attempts++
#endif

inline handle(rows)
{
    n = 1;
    do
    :: n <= MESSAGES ->
        if
        :: (rows & BIT(n)) ->
            assert(!((handled | dead) & BIT(n)));           /* nothing twice */
            assert(n > last_handled);                       /* order */
            last_handled = n; handled = handled | BIT(n)
        :: else
        fi;
        n++
    :: else -> break
    od;
    n = 0
}

/* what a transaction leaves that did not commit */
#define ROLL_BACK atomic { \
    if :: locked_by == me -> locked_by = 0; LEAVE_TRACE :: else fi; \
    if :: trying == me -> trying = 0 :: else fi }
#define MAY_DIE deaths > 0 -> deaths--; goto dies

proctype Sender()
{
    do
    :: committed < MESSAGES -> committed++
    :: else -> break
    od
}

proctype Members()                                          /* Member.balance: ACQUIRE */
{
    do
    :: atomic {
           changes > 0 && IS_FREE ->
           changes--; owner = 3 - owner; epoch++;
           careful = careful || failed; failed = false      /* NOTE_FAILURE */
       }
    :: changes == 0 || FINISHED -> break
    od
}

proctype Receiver(byte me)
{
    byte its_batch, its_place, its_epoch, its_end;          /* Prefetched */
    byte number, end, place, to, rows, aside, n, tried;
    bool has_prefetched;

next:
    atomic { number = 0; end = 0; place = 0; to = 0; rows = 0; aside = 0; tried = 0 }
    if
    :: atomic {                                             /* claim.claim */
           IS_FREE && IS_MINE && !careful && !has_prefetched && SOMETHING_NEW ->
           locked_by = me;
           number = (is_open -> batch : batch + 1);
           end = (is_open -> open : committed);
           place = PLACE;
           if
           :: failed -> end = place
           :: !failed && place < end -> to = end
           :: !failed && place + 1 < end -> to = place + 1
           :: !failed && place == end -> to = end
           fi;
           goto claimed
       }
    :: atomic {                                             /* Prefetch.read, committed at once */
           IS_FREE && IS_MINE && !careful && !has_prefetched && SOMETHING_NEW && parked == 0 ->
           if
           :: failed -> careful = true; failed = false
           :: else ->
               if
               :: !is_open -> batch++; open = committed; position = 0; is_open = true
               :: else
               fi;
               if
               :: PLACE < open ->
                   its_batch = batch; its_place = PLACE; its_epoch = epoch; its_end = open;
                   has_prefetched = true
               :: else -> done = open; is_open = false; position = 0
               fi
           fi;
           goto next
       }
    :: atomic {                                             /* Prefetch.take: TAKE */
           has_prefetched ->
           if
           :: IS_FREE && IS_MINE_STILL && is_open && !careful && !failed && parked == 0 && IS_THERE ->
               locked_by = me;
               number = its_batch; end = its_end; place = its_place;
               if
               :: to = end
               :: place + 1 < end -> to = place + 1
               fi;
               goto claimed
           :: else -> has_prefetched = false; its_batch = 0; its_place = 0; its_epoch = 0; its_end = 0;
               goto next
           fi
       }
    :: atomic {                                             /* Trying._count: a lane */
           IS_FREE && IS_MINE && parked && trying == 0 ->
           if
           :: attempts >= ATTEMPTS ->                       /* the last attempt ended its process */
               dead = dead | BIT(FIRST_OF(parked)); last_handled = FIRST_OF(parked);
               parked = parked & ~BIT(FIRST_OF(parked)); attempts = 0
           :: else -> COUNT_BEFORE; tried = attempts; trying = me
           fi;
           careful = careful || failed; failed = false;
           if
           :: tried -> goto alone
           :: else -> goto next
           fi
       }
    :: atomic {                                             /* Trying._count_shard */
           IS_FREE && IS_MINE && careful && parked == 0 ->
           if
           :: !is_open && committed > done -> batch++; open = committed; position = 0; is_open = true
           :: else
           fi;
           if
           :: is_open && PLACE < open ->
               position = PLACE + 1;
               parked = BIT(position); attempts = 2; tried = 2; trying = me;
               if
               :: position == open -> done = open; is_open = false; position = 0
               :: else
               fi
           :: else ->
               careful = false;
               if :: is_open -> done = open; is_open = false; position = 0 :: else fi
           fi;
           failed = false;
           if
           :: tried -> goto alone
           :: else -> goto next
           fi
       }
    :: FINISHED -> goto gone
    fi;

claimed:                                                    /* the transaction of a delivery */
    atomic {
        if
        :: to > place ->
            rows = BETWEEN(place, to);
            if :: parked -> aside = rows; rows = 0 :: else fi   /* its key waits */
        :: else
        fi
    }
    if
    :: POISON && (rows & BIT(POISON)) -> goto dies
    :: MAY_DIE
    :: !(rows & BIT(POISON)) || POISON == 0 ->
        atomic {                                            /* Delivery.settle, claim.move, commit */
            assert(IS_MINE);                                /* only the owner handles */
            if
            :: to > place ->
                handle(rows);
                parked = parked | aside;
                batch = number; open = end; position = to; is_open = true;
                if :: to == end -> done = end; is_open = false; position = 0 :: else fi
            :: to == place || to == 0 ->
                if
                :: failed -> careful = true                 /* allowance = 1 */
                :: else -> done = (is_open -> open : done); is_open = false; position = 0
                fi
            fi;
            failed = false; locked_by = 0;
            if
            :: has_prefetched && to < its_end -> its_place = to
            :: else -> has_prefetched = false; its_batch = 0; its_place = 0; its_epoch = 0; its_end = 0
            fi
        }
        goto next
    fi;

alone:                                                      /* Trying._tried */
    atomic {
        if
        :: IS_FREE && IS_MINE && parked && attempts == tried ->
            locked_by = me; rows = BIT(FIRST_OF(parked))
        :: !(IS_FREE && IS_MINE && parked && attempts == tried) ->
            if                                              /* somebody else has it: uncount */
            :: parked && attempts == tried -> attempts--
            :: else
            fi;
            trying = 0; goto next
        fi
    }
    if
    :: POISON && (rows & BIT(POISON)) -> goto dies
    :: MAY_DIE
    :: !(rows & BIT(POISON)) || POISON == 0 ->
        atomic {
            assert(IS_MINE);                                /* only the owner handles */
            handle(rows);
            parked = parked & ~rows; attempts = 0; careful = false;
            failed = false; locked_by = 0; trying = 0
        }
        goto next
    fi;

dies:
    ROLL_BACK;
    atomic {
        has_prefetched = false; its_batch = 0; its_place = 0; its_epoch = 0; its_end = 0;
        if
        :: lives > 0 -> lives--; goto next                  /* another one is started */
        :: else
        fi
    }

gone:
    living--
}

init
{
    atomic { run Sender(); run Receiver(1); run Receiver(2); run Members() }
    living == 0 ->
    assert(FINISHED && (handled | dead) == BETWEEN(0, MESSAGES));       /* nothing lost */
    assert(dead == (POISON -> BIT(POISON) : 0))             /* only the poison is dead */
}
