/* Messages by name: held at the source, until they move into the outbox (migrations/baseline/held.sql).
 *
 * Senders of one name, one of whom replaces what is there; one who takes it back; and two movers.
 * Each has a transaction, which takes the name's lock, does one thing, and commits, is rolled back
 * or dies. A mover does not wait for the lock.
 *
 * Proven: each message that was held is sent, replaced or taken back, and only one of these; and of
 * all messages of the name, one at most is there at any time.
 */

#define SENDERS 3
#define BIT(n) (1 << (n))

byte lock;                    /* who has the lock of the name; 0: nobody */
bool there, is_held;          /* the row, as it is committed; not held: sent */
byte current;                 /* its message */
byte held, skipped, replaced, taken_back, sent;  /* messages, as bits */
byte living = SENDERS + 1;

#define LOCK(me) atomic { lock == 0 -> lock = me }
#define UNLOCK lock = 0

proctype Sender(byte me; bool replaces)
{
    LOCK(me);
    atomic {
        if
        :: there && (!is_held || !replaces) -> skipped = skipped | BIT(me)
        :: !there || (is_held && replaces) ->
            if
            :: there -> replaced = replaced | BIT(current)
            :: else
            fi;
            there = true; is_held = true; current = me; held = held | BIT(me)
        :: true                               /* rolled back, or dead */
        fi;
        UNLOCK
    }
    living--
}

proctype Canceller()
{
    byte found;

#ifdef CANCEL_WHAT_WAS_READ                   /* planted: decides before it has the lock */
    atomic { found = (there && is_held -> current : 0) }
    LOCK(SENDERS + 1);
#else
    LOCK(SENDERS + 1);
    atomic { found = (there && is_held -> current : 0) }
#endif
    atomic {
        if
        :: found -> taken_back = taken_back | BIT(found); there = false; current = 0
        :: true
        fi;
        UNLOCK
    }
    living--
}

#ifdef MOVE_LOCKED                            /* planted: moves what somebody else has locked */
#define MOVABLE true
#define TAKE(me) skip
#define GIVE_BACK skip
#else
#define MOVABLE (lock == 0)
#define TAKE(me) lock = me
#define GIVE_BACK UNLOCK
#endif

proctype Mover(byte me)
{
    byte found;

    do
    :: atomic { there && is_held && MOVABLE -> found = current; TAKE(me) };
       atomic {
           if
           :: assert(!(sent & BIT(found)));   /* nothing twice */
              sent = sent | BIT(found); is_held = false
           :: true                            /* dead: another one goes on */
           fi;
           GIVE_BACK; found = 0
       }
    :: atomic { living == 0 && (!there || !is_held) -> break }
    od
}

proctype Checker()
{
    atomic {
        living == 0 && lock == 0 && (!there || !is_held) ->
        assert((sent & taken_back) == 0);                      /* never both */
        assert(((sent | taken_back) & replaced) == 0);         /* replaced is gone */
        assert((sent | taken_back | replaced) == held)         /* never neither */
    }
}

init
{
    atomic {
        run Sender(1, false); run Sender(2, true); run Sender(3, false);
        run Canceller();
        run Mover(SENDERS + 2); run Mover(SENDERS + 3);
        run Checker()
    }
}
