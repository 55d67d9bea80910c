/* Parked: a source that has messages parked comes back as an older copy of itself.
 *
 * A message may be parked in a lane instead of being stored, and later ones go on. The lane is
 * released from its beginning, as far as the destination takes it. Some messages it refuses for
 * good, and a person takes some out of the lane. So the marks of the shard and of the lane pass
 * messages that are not stored. A copy of the source is taken at any time, and restored at any
 * later time: then it has messages parked of which others know what became of them. One forwarder
 * goes on; what it is refused for is repaired by `saf rebase` (saf.operating.repair.rebase).
 *
 * Proven: nothing is dropped that is neither there, nor parked, nor set aside in this life of the
 * source, also after the repair; nothing is refused if the source was not set back; in the end
 * nothing is lost; and it comes to an end.
 *
 * What nobody asks about is not noticed, so the last thing that happens is that a message is sent.
 */

#define MESSAGES 3              /* sent in all; some of them are gone after a set-back */
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef WAITS
#define WAITS 2                 /* messages that are parked, in all lives */
#endif
#ifndef DECISIONS
#define DECISIONS 1             /* messages that the destination refuses, or a person takes out */
#endif
#ifndef TRIES
#define TRIES 2                 /* batches that are opened for the lane alone */
#endif
#define BIT(n) (1 << (n))
#define NUMBER(batch, id) ((batch) * 8 + (id))
#define BATCH(number) ((number) / 8)

/* what is stored at the source. A message is told from others by what it says, not by its id */
typedef Source {
    byte says[MESSAGES + 1];    /* by id */
    byte sent;                  /* the last id */
    byte batch, opened_at, done, open, position;
    bool is_open;
    byte acknowledged, acknowledged_at;                     /* a mark: its number, its opened_at */
    byte lane_acknowledged, lane_acknowledged_at;
    byte parked;                /* ids in the lane, */
    byte place[MESSAGES + 1];   /* each with its number in it, */
    byte opened[MESSAGES + 1];  /* and the opened_at of its batch */
    byte aside;                 /* ids that are dead letters, or that a person took out */
    int noted;                  /* when messages were set aside, as bits, */
    byte newest                 /* and the last time */
}
Source source, source_copy;
/* the destination */
byte mark, marked_at, lane_mark, lane_marked_at, set_aside_at;
byte stored;                    /* what messages say, as bits */
byte next_message = 1, now;
bool is_copied, is_in_hand, is_over;
byte life;
byte faults = FAULTS, waits = WAITS, decisions = DECISIONS, tries = TRIES;

inline copy_source(from, to)
{
    row = 1;
    do
    :: row <= MESSAGES ->
        to.says[row] = from.says[row]; to.place[row] = from.place[row];
        to.opened[row] = from.opened[row]; row++
    :: else -> break
    od;
    row = 0;
    to.sent = from.sent; to.batch = from.batch; to.opened_at = from.opened_at; to.done = from.done;
    to.open = from.open; to.position = from.position; to.is_open = from.is_open;
    to.acknowledged = from.acknowledged; to.acknowledged_at = from.acknowledged_at;
    to.lane_acknowledged = from.lane_acknowledged;
    to.lane_acknowledged_at = from.lane_acknowledged_at;
    to.parked = from.parked; to.aside = from.aside; to.noted = from.noted; to.newest = from.newest
}

inline note() { now++; source.newest = now; source.noted = source.noted | BIT(now) }

#ifdef PERSON_NOTES_NOTHING     /* planted: what a person takes out leaves no time */
#define NOTE_TAKEN_OUT skip
#else
#define NOTE_TAKEN_OUT note()   /* cursor.note_taken_out */
#endif
#ifdef LANE_NOTES_NOTHING       /* planted: nor does a dead letter that was parked */
#define NOTE_DEAD skip
#else
#define NOTE_DEAD note()        /* SetAside.write_from_lanes */
#endif

proctype World()
{
    byte row, one;

    do
    :: atomic {
           next_message < MESSAGES ->
           source.sent++; source.says[source.sent] = next_message; next_message++
       }
    :: atomic {                                             /* HeldParked, not of a lane in hand */
           decisions > 0 && source.parked && !is_in_hand ->
           select(one: 1 .. MESSAGES);
           if
           :: (source.parked & BIT(one)) ->
               decisions--;
               source.parked = source.parked & ~BIT(one); source.aside = source.aside | BIT(one);
               NOTE_TAKEN_OUT
           :: else
           fi;
           one = 0
       }
    :: atomic { !is_copied -> is_copied = true; copy_source(source, source_copy) }
    :: atomic {                                             /* tasks of the source have ended */
           is_copied && life == 0 -> life++; is_in_hand = false; copy_source(source_copy, source)
       }
    :: next_message == MESSAGES -> break
    od;
    atomic {
        source.sent++; source.says[source.sent] = next_message; next_message++; is_over = true
    }
}

#define THERE(row) (stored & BIT(source.says[row]))
#define HAS_FORGOTTEN (set_aside_at != 0 && !(source.noted & BIT(set_aside_at)))
#define AHEAD (mark != 0 && marked_at != source.opened_at && \
    !(mark == source.acknowledged && marked_at == source.acknowledged_at))
/* `not_parked`: if a message is still parked, no answer has come for it */
#define IS_PARKED(row) ((source.parked & BIT(row)) && source.opened[row] == lane_marked_at)
#define MARK_IS_PARKED (IS_PARKED(1) || IS_PARKED(2) || IS_PARKED(3))
#define LANE_AHEAD (lane_mark != 0 && lane_marked_at != source.opened_at && \
    !(lane_mark == source.lane_acknowledged && lane_marked_at == source.lane_acknowledged_at) && \
    !MARK_IS_PARKED)
#ifdef NO_SHIFT                 /* planted: what is parked keeps its numbers */
#define SHIFT_PARKED skip
#else
#define SHIFT_PARKED source.place[row] = source.place[row] + NUMBER(BATCH(to), 0)
#endif

inline rebase()                 /* rebase._go_on_after */
{
    assert(life);                                           /* no false alarm */
    to = (mark > lane_mark -> mark : lane_mark);
    source.batch = source.batch + BATCH(to);
    row = 1;
    do
    :: row <= MESSAGES -> if :: source.parked & BIT(row) -> SHIFT_PARKED :: else fi; row++
    :: else -> break
    od;
    row = 0; to = 0;
    if
    :: set_aside_at != 0 ->
        source.noted = source.noted | BIT(set_aside_at);
        source.newest = (set_aside_at > source.newest -> set_aside_at : source.newest)
    :: else
    fi;
    source.acknowledged = mark; source.acknowledged_at = marked_at;
    source.lane_acknowledged = lane_mark; source.lane_acknowledged_at = lane_marked_at
}

inline say_when()               /* places.noting */
{
    if :: last && source.newest > set_aside_at -> set_aside_at = source.newest :: else fi
}

#ifdef LANE_SAYS_NOTHING        /* planted: what is stored from the lane does not say these times */
#define SAY_WHEN skip
#else
#define SAY_WHEN say_when()
#endif

proctype Forwarder()
{
    byte mine, to, row, last, gone, answered, answered_at;
    bool tried;

next:
    atomic { to = 0; row = 0; last = 0; gone = 0; answered = 0; answered_at = 0; tried = false }
    if
    :: atomic {                                             /* OPEN */
           !source.is_open && (source.sent > source.done || source.parked && tries > 0) ->
           if :: source.sent == source.done -> tries-- :: else fi;
           mine = life;
           now++; source.batch++; source.opened_at = now; source.open = source.sent;
           source.position = source.done; source.is_open = true;
           assert(now < 31 && source.batch < 31)            /* what the variables hold */
       }
    :: atomic { source.is_open -> mine = life }
    :: is_over && !source.is_open && source.sent == source.done -> goto end
    fi;

lane:                                                       /* Releasing._release */
    if
    :: atomic { !tried && source.parked && mine == life -> is_in_hand = true; tried = true }
    :: source.position < source.open -> goto new            /* its time has not come */
    :: source.position == source.open -> goto close
    :: mine != life -> goto next
    fi;
release:
    atomic {
        if
        :: mine != life -> goto next
        :: HAS_FORGOTTEN || LANE_AHEAD -> rebase(); goto release
        :: else
        fi;
        last = 0; gone = 0; row = 1;
        do
        :: row <= source.sent ->
            if
            :: !(source.parked & BIT(row)) -> skip
            :: BATCH(source.place[row]) == source.batch && row > source.position -> skip
            :: else ->
                if
                :: source.place[row] <= lane_mark ->
                    assert(THERE(row));                     /* not dropped silently */
                    last = row
                :: source.place[row] > lane_mark ->
                    if
                    :: stored = stored | BIT(source.says[row]); last = row
                    :: decisions > 0 ->                     /* SetAside.write_ahead */
                        decisions--; NOTE_DEAD;
                        source.parked = source.parked & ~BIT(row);
                        source.aside = source.aside | BIT(row)
                    :: break                                /* it is not taken yet */
                    fi
                fi;
                gone = gone | BIT(row)
            fi;
            row++
        :: else -> break
        od;
        row = 0;
        SAY_WHEN;
        if
        :: last && source.place[last] > lane_mark ->
            lane_mark = source.place[last]; lane_marked_at = source.opened[last]
        :: else
        fi;
        answered = lane_mark; answered_at = lane_marked_at
    }
    if
    :: faults > 0 -> faults--; goto release                 /* the answer got lost */
    :: true
    fi;
    atomic {                                                /* ParkedLanes.settle */
        if
        :: mine != life -> goto next
        :: else
        fi;
        source.parked = source.parked & ~gone;
        if
        :: last -> source.lane_acknowledged = answered; source.lane_acknowledged_at = answered_at
        :: else
        fi;
        is_in_hand = false; last = 0; gone = 0; answered = 0; answered_at = 0
    }
    goto lane;

new:
    atomic {                                                /* the destination stores, or refuses */
        if
        :: mine != life -> goto next
        :: HAS_FORGOTTEN || AHEAD -> rebase(); goto new
        :: else
        fi;
        to = 0; last = 0; row = source.position + 1;
        do
        :: row <= source.open ->
            if
            :: source.parked & BIT(row) || source.aside & BIT(row) -> skip
            :: else ->
                if
                :: NUMBER(source.batch, row) <= mark ->
                    assert(THERE(row));                     /* not dropped silently */
                    last = row
                :: NUMBER(source.batch, row) > mark ->
                    if
                    :: stored = stored | BIT(source.says[row]); last = row
                    :: waits > 0 ->                         /* SetAside.write_ahead */
                        waits--; note(); source.parked = source.parked | BIT(row);
                        source.place[row] = NUMBER(source.batch, row);
                        source.opened[row] = source.opened_at
                    fi
                fi
            fi;
            to = row;
            row++;
            if :: break :: row <= source.open fi            /* a chunk may be small */
        :: else -> break
        od;
        row = 0;
        say_when();
        if
        :: last && NUMBER(source.batch, last) > mark ->
            mark = NUMBER(source.batch, last); marked_at = source.opened_at
        :: else
        fi;
        answered = mark; answered_at = marked_at
    }
    if
    :: faults > 0 -> faults--; goto new                     /* the answer got lost */
    :: true
    fi;
    atomic {                                                /* Task._settle */
        if
        :: mine != life -> goto next
        :: else
        fi;
        source.position = to;
        if
        :: last -> source.acknowledged = answered; source.acknowledged_at = answered_at
        :: else
        fi;
        to = 0; last = 0; answered = 0; answered_at = 0
    }
    goto lane;

close:
    atomic {
        if
        :: mine == life -> source.done = source.open; source.is_open = false; source.position = 0
        :: else
        fi
    }
    goto next;
end:
    atomic {
        row = 1;
        do
        :: row <= source.sent ->
            assert(THERE(row) || (source.parked | source.aside) & BIT(row));    /* nothing lost */
            row++
        :: else -> break
        od
    }
}

init { atomic { run World(); run Forwarder() } }
