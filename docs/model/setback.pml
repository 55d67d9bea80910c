/* Set back: a source, or its destination, comes back as an older copy of itself.
 *
 * A copy is taken at any time, and restored at any later time: of the source, of the destination,
 * or of both. Ids, batches and positions are then given again, to other messages. One forwarder
 * goes on; what it is refused for is repaired by `saf rebase` (saf.operating.repair). A message may be set
 * aside instead of being stored, and so may messages for another destination.
 *
 * Proven: at the next contact after a set-back, nothing is dropped that is neither there nor set
 * aside, and nothing goes on while the destination lacks what the source takes for delivered; after
 * the repairs, all that the source still has is at the destination or set aside; nothing is refused
 * if neither was set back; and it comes to an end.
 *
 * What nobody asks about is not noticed, so the last thing that happens is that a message is sent.
 */

#ifndef MESSAGES
#define MESSAGES 4              /* sent in all; some of them are gone after a set-back */
#endif
#ifndef FAULTS
#define FAULTS 1
#endif
#ifndef REJECTIONS
#define REJECTIONS 1
#endif
#define BIT(n) (1 << (n))
#define NUMBER(batch, id) ((batch) * 8 + (id))

/* what is stored at the source. A message is told from others by what it says, not by its id */
typedef Source {
    byte says[MESSAGES + 1];    /* by id */
    byte sent;                  /* the last id */
    byte batch, opened_at, done, open, position;
    bool is_open;
    byte acknowledged, acknowledged_at;                     /* a mark: its number, its opened_at */
    byte again;                 /* ids that are parked to be sent again */
    byte aside;                 /* ids that are set aside */
    int noted;                  /* when messages were, as bits, */
    byte newest                 /* and the last time */
}
typedef Destination {
    byte mark, marked_at, set_aside_at;
    byte stored                 /* what messages say, as bits */
}
Source source, source_copy;
Destination there, there_copy;
byte next_message = 1, now;
bool source_is_copied, destination_is_copied;
byte source_life, destination_life;
byte faults = FAULTS, rejections = REJECTIONS;
bool is_over;

inline copy_source(from, to)
{
    row = 1;
    do
    :: row <= MESSAGES -> to.says[row] = from.says[row]; row++
    :: else -> break
    od;
    row = 0;
    to.sent = from.sent; to.batch = from.batch; to.opened_at = from.opened_at; to.done = from.done;
    to.open = from.open; to.position = from.position; to.is_open = from.is_open;
    to.acknowledged = from.acknowledged; to.acknowledged_at = from.acknowledged_at;
    to.again = from.again; to.aside = from.aside; to.noted = from.noted;
    to.newest = from.newest
}

inline copy_destination(from, to)
{
    to.mark = from.mark; to.marked_at = from.marked_at; to.stored = from.stored;
    to.set_aside_at = from.set_aside_at
}

inline note()                   /* cursor.note_set_aside */
{
    rejections--; now++; source.newest = now; source.noted = source.noted | BIT(now)
}

proctype World()
{
    byte row;

    do
    :: atomic {
           next_message < MESSAGES ->
           source.sent++; source.says[source.sent] = next_message; next_message++
       }
    :: atomic { rejections > 0 -> note() }                  /* for another destination */
    :: atomic { !source_is_copied -> source_is_copied = true; copy_source(source, source_copy) }
    :: atomic {
           !destination_is_copied -> destination_is_copied = true;
           copy_destination(there, there_copy)
       }
    :: atomic {                                             /* tasks of the source have ended */
           source_is_copied && source_life == 0 -> source_life++; copy_source(source_copy, source)
       }
    :: atomic {
           destination_is_copied && destination_life == 0 -> destination_life++;
           copy_destination(there_copy, there)
       }
    :: next_message == MESSAGES -> break
    od;
    atomic {
        source.sent++; source.says[source.sent] = next_message; next_message++; is_over = true
    }
}

#ifdef BY_NUMBER                /* planted: marks do not say when their batch was opened */
#define IS_THE_ACKNOWLEDGED (there.mark == source.acknowledged)
#define IS_OF_THIS_BATCH (there.mark / 8 == source.batch)
#else
#define IS_THE_ACKNOWLEDGED \
    (there.mark == source.acknowledged && there.marked_at == source.acknowledged_at)
#define IS_OF_THIS_BATCH (there.marked_at == source.opened_at)
#endif
#ifdef NOTHING_ACKNOWLEDGED     /* planted: the source remembers no marks */
#define KNOWN 0
#else
#define KNOWN source.acknowledged
#endif
#define IS_ASIDE(row) (source.aside & BIT(row))
#define BEHIND (there.mark < KNOWN)                         /* marks.compare */
#ifdef ONLY_MARKS               /* planted: a set-back that only what was set aside shows is unknown */
#define HAS_FORGOTTEN false
#else
#define HAS_FORGOTTEN (there.set_aside_at != 0 && !(source.noted & BIT(there.set_aside_at)))
#endif
#define AHEAD (HAS_FORGOTTEN || there.mark != 0 && !IS_THE_ACKNOWLEDGED && !IS_OF_THIS_BATCH)
#ifdef NOT_SENT_AGAIN           /* planted: a destination is let go on, and nothing is sent again */
#define SEND_AGAIN skip
#else
#define SEND_AGAIN source.again = source.again | lost
#endif
#ifdef NO_SHIFT                 /* planted: batches do not go on after those that are known there */
#define SHIFT skip
#else
#define SHIFT source.batch = source.batch + there.mark / 8
#endif

inline remember()               /* rebase.REMEMBER_SET_ASIDE */
{
    if
    :: there.set_aside_at != 0 ->
        source.noted = source.noted | BIT(there.set_aside_at);
        source.newest = (there.set_aside_at > source.newest -> there.set_aside_at : source.newest)
    :: else
    fi
}

/* what the source takes for delivered, and the destination has not */
inline find_lost()
{
    lost = 0;
    row = 1;
    do
    :: row <= source.sent ->
        if
        :: (row <= source.done || source.is_open && row <= source.position) &&
           !(there.stored & BIT(source.says[row])) && !(source.again & BIT(row)) &&
           !IS_ASIDE(row) ->
            lost = lost | BIT(row)
        :: else
        fi;
        row++
    :: else -> break
    od;
    row = 0
}

proctype Forwarder()
{
    byte life, to, row, lost, answered, answered_at;

next:
    atomic { to = 0; answered = 0; answered_at = 0 }
    if
    :: atomic {                                             /* OPEN */
           !source.is_open && (source.sent > source.done || source.again) ->
           life = source_life;
           now++; source.batch++; source.opened_at = now; source.open = source.sent;
           source.position = 0; source.is_open = true
       }
    :: atomic { source.is_open -> life = source_life }
    :: is_over && !source.is_open && source.sent == source.done && !source.again -> goto end
    fi;
ask:
    if
    :: atomic {                                             /* the destination stores, or refuses */
           if
           :: life != source_life -> goto next
           :: else
           fi;
           if
           :: BEHIND ->                                     /* saf rebase: send_again.send_again */
               assert(source_life || destination_life);     /* no false alarm */
               find_lost();
               SEND_AGAIN;
               lost = 0;
               source.acknowledged = there.mark; source.acknowledged_at = there.marked_at;
               goto ask
           :: !BEHIND && AHEAD ->                           /* saf rebase: rebase._go_on_after */
               assert(source_life);                         /* no false alarm */
               SHIFT;
               remember();
               source.acknowledged = there.mark; source.acknowledged_at = there.marked_at;
               goto ask
           :: else
           fi;
           find_lost();
           assert(lost == 0);                               /* not continued silently */
           row = 1;                                         /* the replay goes before all else */
           do
           :: row <= source.sent ->
               if
               :: (source.again & BIT(row)) -> there.stored = there.stored | BIT(source.says[row])
               :: else
               fi;
               row++
           :: else -> break
           od;
           source.again = 0;
           row = (source.position > source.done -> source.position : source.done) + 1;
           do
           :: row <= source.open ->
               if
               :: NUMBER(source.batch, row) > there.mark && !IS_ASIDE(row) ->
                   if
                   :: there.stored = there.stored | BIT(source.says[row])
                   :: rejections > 0 -> note(); source.aside = source.aside | BIT(row)
                   fi
               :: else ->
                   assert(there.stored & BIT(source.says[row]) || IS_ASIDE(row))  /* not dropped silently */
               fi;
               to = row;
               row++;
               if :: break :: row <= source.open fi         /* a chunk may be small */
           :: else -> break
           od;
           row = 0;
           if
           :: to && source.newest > there.set_aside_at -> there.set_aside_at = source.newest
           :: else
           fi;
           if
           :: to && NUMBER(source.batch, to) > there.mark ->
               there.mark = NUMBER(source.batch, to); there.marked_at = source.opened_at
           :: else
           fi;
           answered = there.mark; answered_at = there.marked_at
       }
    fi;
    if
    :: faults > 0 -> faults--; to = 0; goto ask             /* the answer got lost */
    :: true
    fi;
    atomic {                                                /* Task._settle */
        if
        :: life != source_life -> goto next
        :: else
        fi;
        if
        :: to ->
            source.position = to;
            source.acknowledged = answered; source.acknowledged_at = answered_at
        :: else
        fi;
        if
        :: to == source.open || to == 0 ->
            source.done = source.open; source.is_open = false; source.position = 0
        :: else
        fi
    }
    goto next;
end:
    atomic {
        row = 1;
        do
        :: row <= source.sent ->
            assert(there.stored & BIT(source.says[row]) || IS_ASIDE(row)); row++  /* nothing lost */
        :: else -> break
        od                                                  /* nothing is lost */
    }
}

init { atomic { run World(); run Forwarder() } }
