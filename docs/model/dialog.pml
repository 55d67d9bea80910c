/* Dialog: what the target's end takes of what the initiator's end says, if either is set back.
 *
 * The initiator says numbered messages. They may come in any order, and twice; only an end that
 * compares is heard after what was said before that. Either broker may come back as an older copy of
 * itself, and is repaired: what it had forwarded since may be on its way again, and its ends compare.
 *
 * Proven: the application is given the numbers in turn, each once, and never a message after another
 * than the one that its sender had said before it; what is dropped as a repeat is one; and in the
 * end, both ends agree about what was said, or have failed, which they do after a set-back only.
 */

#ifndef MESSAGES
#define MESSAGES 4              /* said in all */
#endif
#ifndef REPEATS
#define REPEATS 1
#endif
#define BIT(n) (1 << (n))
#define ALL_SAID ((1 << (said + 1)) - 2)

/* a message: its number, and the lineage of who says it: numbers above ``after`` are incarnation 1's */
typedef Message { byte number, incarnation, after, before }
Message message[MESSAGES + 1];  /* ``before`` is the message that was said before it */
byte said;
byte on_its_way;                /* what the outbox has pending */
byte arrived;                   /* what the inbox has, and is not received */
byte repeats = REPEATS;

/* the ends: rows of saf.conversation */
typedef Initiator { byte sent, incarnation, after; byte says[MESSAGES + 1] }
typedef Target { byte received, incarnation, after; byte got[MESSAGES + 1] }
Initiator initiator, initiator_copy;
Target target, target_copy;
byte said_at_copy, arrived_at_copy;
bool initiator_is_copied, initiator_is_back, target_is_copied, target_is_back;
bool failed;                    /* both ends have an Error, or will get it */
bool is_over;

/* a message of the type saf:compare, on its way to the target */
bool compares;
byte sent_by_then, incarnation_by_then, after_by_then, said_by_then;

inline compare_initiator()                                  /* comparing.SAY_ALL, say_these */
{
    compares = true;
    sent_by_then = initiator.sent; incarnation_by_then = initiator.incarnation;
    after_by_then = initiator.after; said_by_then = ALL_SAID
}
#ifdef NO_COMPARING             /* planted: a repaired end says nothing of itself */
#define COMPARE skip
#else
#define COMPARE compare_initiator()
#endif
#ifdef NO_LINEAGE               /* planted: messages do not say which incarnation has said them */
#define NEW_INCARNATION initiator.incarnation = 0
#else
#define NEW_INCARNATION initiator.incarnation = 1; initiator.after = initiator.sent
#endif
#ifdef TAKE_WHAT_COMES          /* planted: a missing message is not waited for */
#define IS_NEXT(n) (n > target.received)
#else
#define IS_NEXT(n) (n == target.received + 1)
#endif
#define SAID_BY(incarnation, after, number) \
    (((incarnation) > 0 && (number) > (after)) -> 1 : 0)
#ifdef TAKE_FORGOTTEN           /* planted: what an earlier incarnation has said is not told apart */
#define FORGOTTEN(m) false
#else
#define FORGOTTEN(m) \
    (SAID_BY(target.incarnation, target.after, m.number) != \
     SAID_BY(m.incarnation, m.after, m.number))
#endif

proctype World()
{
    byte row;

    do
    :: atomic {                                             /* statements.SEND */
           said < MESSAGES && !failed ->
           said++;
           message[said].before = initiator.says[initiator.sent];
           initiator.sent++; initiator.says[initiator.sent] = said;
           message[said].number = initiator.sent;
           message[said].incarnation = initiator.incarnation;
           message[said].after = initiator.after;
           on_its_way = on_its_way | BIT(said)
       }
    :: atomic {
           !initiator_is_copied ->
           initiator_is_copied = true; said_at_copy = ALL_SAID;
           initiator_copy.sent = initiator.sent;
           row = 1;
           do
           :: row <= MESSAGES -> initiator_copy.says[row] = initiator.says[row]; row++
           :: else -> break
           od;
           row = 0
       }
    :: atomic {                                             /* set back, and rebase.rebase */
           initiator_is_copied && !initiator_is_back ->
           initiator_is_back = true;
           initiator.sent = initiator_copy.sent;
           row = 1;
           do
           :: row <= MESSAGES -> initiator.says[row] = initiator_copy.says[row]; row++
           :: else -> break
           od;
           row = 0;
           if
           :: on_its_way = said_at_copy                     /* forwarded a second time */
           :: on_its_way = on_its_way & said_at_copy
           fi;
           NEW_INCARNATION;
           COMPARE
       }
    :: atomic {
           !target_is_copied ->
           target_is_copied = true; arrived_at_copy = arrived;
           target_copy.received = target.received;
           target_copy.incarnation = target.incarnation; target_copy.after = target.after;
           row = 1;
           do
           :: row <= MESSAGES -> target_copy.got[row] = target.got[row]; row++
           :: else -> break
           od;
           row = 0
       }
    :: atomic {                                             /* set back, and send_again.send_again */
           target_is_copied && !target_is_back && !failed ->
           target_is_back = true;
           target.received = target_copy.received;
           target.incarnation = target_copy.incarnation; target.after = target_copy.after;
           row = 1;
           do
           :: row <= MESSAGES -> target.got[row] = target_copy.got[row]; row++
           :: else -> break
           od;
           row = 0;
           arrived = arrived_at_copy;
           if
           :: row = 1;
               do
               :: row <= initiator.sent ->
                   on_its_way = on_its_way | BIT(initiator.says[row]); row++
               :: else -> break
               od;
               row = 0
           :: true                                          /* purged meanwhile */
           fi;
           COMPARE
       }
    :: said == MESSAGES || failed -> break
    od;
    is_over = true
}

inline forward(m)
{
    arrived = arrived | BIT(m);
    if
    :: on_its_way = on_its_way & ~BIT(m)
    :: repeats > 0 -> repeats--                             /* it comes once more */
    fi
}

proctype Forwarder()
{
end:
    do
    :: atomic { (on_its_way & BIT(1)) -> forward(1) }
    :: atomic { (on_its_way & BIT(2)) -> forward(2) }
    :: atomic { (on_its_way & BIT(3)) -> forward(3) }
#if MESSAGES > 3
    :: atomic { (on_its_way & BIT(4)) -> forward(4) }
#endif
#if MESSAGES > 4
    :: atomic { (on_its_way & BIT(5)) -> forward(5) }
#endif
    od
}

/* `set_back._note_lineages`: a new incarnation speaks, and this end has received what it forgot */
inline note_lineage(incarnation_there, after_there)
{
    if
    :: incarnation_there > target.incarnation ->
        target.incarnation = incarnation_there; target.after = after_there;
        if
        :: after_there < target.received -> failed = true
        :: else
        fi
    :: else
    fi
}
#define WAITS(m) \
    (!failed && message[m].incarnation <= target.incarnation && !FORGOTTEN(message[m]) && \
     message[m].number > target.received && !IS_NEXT(message[m].number))
#define TO_RECEIVE(m) ((arrived & BIT(m)) && !WAITS(m))
#if MESSAGES > 4
#define ANY_MORE (TO_RECEIVE(4) || TO_RECEIVE(5))
#elif MESSAGES > 3
#define ANY_MORE TO_RECEIVE(4)
#else
#define ANY_MORE false
#endif
#define NOTHING_TO_RECEIVE !(TO_RECEIVE(1) || TO_RECEIVE(2) || TO_RECEIVE(3) || ANY_MORE)

inline receive(m)                                           /* arrival.arrive */
{
    note_lineage(message[m].incarnation, message[m].after);
    if
    :: FORGOTTEN(message[m]) -> arrived = arrived & ~BIT(m)             /* a dead letter */
    :: !FORGOTTEN(message[m]) && failed -> arrived = arrived & ~BIT(m)
    :: !FORGOTTEN(message[m]) && !failed && message[m].number <= target.received ->
        assert(target.got[message[m].number] == m);                     /* a repeat is one */
        arrived = arrived & ~BIT(m)
    :: !FORGOTTEN(message[m]) && !failed && IS_NEXT(message[m].number) ->
        assert(message[m].number == target.received + 1);               /* in turn */
        assert(target.got[target.received] == message[m].before);       /* not mixed up */
        target.received = message[m].number;
        target.got[target.received] = m;
        arrived = arrived & ~BIT(m)
    :: else                                                 /* it waits */
    fi
}

proctype Receiver()
{
end:
    do
    :: atomic { TO_RECEIVE(1) -> receive(1) }
    :: atomic { TO_RECEIVE(2) -> receive(2) }
    :: atomic { TO_RECEIVE(3) -> receive(3) }
#if MESSAGES > 3
    :: atomic { TO_RECEIVE(4) -> receive(4) }
#endif
#if MESSAGES > 4
    :: atomic { TO_RECEIVE(5) -> receive(5) }
#endif
    :: atomic {                                             /* set_back.compare */
           compares && !(on_its_way & said_by_then) && NOTHING_TO_RECEIVE ->
           compares = false;
           if
           :: incarnation_by_then < target.incarnation      /* an earlier one: nobody asks it */
           :: else ->
               note_lineage(incarnation_by_then, after_by_then);
               if
               :: sent_by_then > target.received || target.received > initiator.sent ->
                   failed = true
               :: else
               fi
           fi;
           sent_by_then = 0; incarnation_by_then = 0; after_by_then = 0; said_by_then = 0
       }
    od
}

#define AGREES(n) (n > initiator.sent || target.got[n] == initiator.says[n])

init
{
    atomic { run World(); run Forwarder(); run Receiver() }
    timeout ->
    assert(is_over);                                        /* it comes to an end */
    assert(!failed || initiator_is_back || target_is_back); /* it fails for a reason */
    assert(failed || target.received == initiator.sent);    /* nobody waits for ever */
    assert(failed || (AGREES(1) && AGREES(2) && AGREES(3) && AGREES(MESSAGES)))   /* both mean the same */
}
