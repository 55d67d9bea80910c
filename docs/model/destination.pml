/* The destination of forwarding.pml: what it keeps, and what is done there in one step.
 *
 * A request is a process of its own, because it is under way: it is done at some time, whoever
 * still waits for its answer, and whoever has been asked something since.
 */

#define POSTGRESQL 1      /* one transaction there; also what a request of kind https makes there */
#define REDIS 2           /* a script compares the marks and sets them */
#define NATS 3            /* a batch, which compares the sequence of the marks */
#define KAFKA 4           /* a transaction of a fixed name, which fences whoever had the name */
#define RABBITMQ_STREAM 5 /* publishing ids, marks after the messages, no fencing */
#define DELTA 6           /* a commit that fails if another one was about the same shard */
#define ICEBERG 7         /* a commit that fails if any other one has come first */

#define EXACTLY_ONCE 1
#define AT_LEAST_ONCE 2
#define AT_MOST_ONCE 3

byte known_epoch, mark;   /* a mark is the number of a message: see NUMBER */
byte version;             /* which write of the marks is the last one */
byte producer;            /* KAFKA: which client of the name is the last one */
byte begun, begun_epoch;  /* RABBITMQ_STREAM: which batch the journal says is begun, as a mark */
byte published;           /*                  the last id of the publisher */

/* what is observed */
byte stored[MESSAGES + 1];
byte last_stored, newest_stored;

#if KIND == RABBITMQ_STREAM && !defined(FENCED)
#define IS_FENCED false   /* it is not, and does not promise it; -DFENCED shows that */
#else
#define IS_FENCED true
#endif

/* sent at most once, and given up: its sender said so, and it may still arrive */
#define IN_DOUBT(number) (QUALITY == AT_MOST_ONCE && (dead & BIT(number)))

inline put(number, by)
{
    assert(!IS_FENCED || by >= newest_stored);                  /* fenced */
    assert(!IS_FENCED || !(dead & BIT(number)) || IN_DOUBT(number)); /* no dead letter arrives */
    if
    :: stored[number] == 0 && number > last_stored -> last_stored = number
    :: stored[number] == 0 && number < last_stored ->
        assert(IN_DOUBT(number))                                /* order */
    :: else -> assert(QUALITY == AT_LEAST_ONCE)                 /* nothing twice */
    fi;
    stored[number]++;
    if :: by > newest_stored -> newest_stored = by :: else fi
}

#ifdef NO_EPOCH                 /* planted: the destination does not look at epochs */
#define IS_NEWER(epoch, by) false
#else
#define IS_NEWER(epoch, by) ((epoch) > (by))
#endif
#if defined(NO_MARK)            /* planted: nothing is dropped */
#define IS_THERE(number, m) false
#else
#define IS_THERE(number, m) (QUALITY == EXACTLY_ONCE && NUMBER(batch_of[number], number) <= (m))
#endif
#ifdef NO_COMPARE               /* planted: it sets, and does not compare */
#define UNCHANGED(a, b) true
#else
#define UNCHANGED(a, b) ((a) == (b))
#endif

mtype = { NOTHING, STORED, MOVED, OLDER, AHEAD, BEHIND }
mtype answer[FORWARDERS + 1] = NOTHING;
byte answered[FORWARDERS + 1];          /* the mark there, with the answer */
byte asked[FORWARDERS + 1];             /* the number of the request that is waited for */

/* `places.refuse`: what becomes of a chunk at a destination with this epoch and this mark */
#define VERDICT(e, m, by, known, in_hand) \
    (IS_NEWER(e, by) -> OLDER : \
    (QUALITY == AT_MOST_ONCE -> STORED : \
    ((m) < (known) -> BEHIND : \
    ((m) != 0 && (m) != (known) && BATCH(m) != (in_hand) -> AHEAD : STORED))))

/* `places.last_of`: the mark after the rows */
#define AFTER(m, rows) \
    ((rows) && NUMBER(batch_of[LAST_OF(rows)], LAST_OF(rows)) > (m) \
     -> NUMBER(batch_of[LAST_OF(rows)], LAST_OF(rows)) : (m))

inline put_all(rows, by, there)
{
    do
    :: row <= MESSAGES ->
        if
        :: (rows & BIT(row)) && !IS_THERE(row, there) -> put(row, by)
        :: else
        fi;
        row++
    :: else -> break
    od
}

inline answer_now(what)
{
    if
    :: asked[who] == number -> answer[who] = what; answered[who] = mark; asked[who] = 0
    :: else                                     /* nobody waits for it */
    fi
}

#define MOVE mark = AFTER(mark, rows); known_epoch = by; version++
#ifdef MARK_APART               /* planted: the mark moves in a transaction of its own */
#define MOVE_MARKS skip
#define LATER_MARKS atomic { if :: what == STORED -> MOVE :: else fi }
#else
#define MOVE_MARKS MOVE
#define LATER_MARKS skip
#endif

#if KIND == ICEBERG
/* other commits of the table: of another shard, or by who compacts it */
proctype Others()
{
    if
    :: true -> version++
    :: true
    fi
}
#endif

#if KIND == RABBITMQ_STREAM
/* `Publishers.publish`: one message after the other; the server drops what is not above the last */
proctype Request(byte who, number, by, in_hand, rows, known, read)
{
    byte row = 1;

    do
    :: row <= MESSAGES ->
        atomic {
            if
            :: (rows & BIT(row)) && NUMBER(batch_of[row], row) > published ->
                put(row, by);
                published = NUMBER(batch_of[row], row)
            :: else
            fi;
            row++
        }
    :: else -> break
    od;
    atomic { row = 0; answer_now(STORED) }
}
#else
proctype Request(byte who, number, by, in_hand, rows, known, read)
{
    byte row = 1, there;
    mtype what = STORED;

    atomic {
#if KIND == POSTGRESQL
        what = VERDICT(known_epoch, mark, by, known, in_hand);  /* under the watermarks' locks */
#elif KIND == KAFKA
        what = (UNCHANGED(read, producer) -> STORED : MOVED);   /* who was fenced ends nothing */
#else
        what = (UNCHANGED(read, version) -> STORED : MOVED);
#endif
        if
        :: what == STORED ->
            if :: KIND == POSTGRESQL -> there = mark :: else fi;    /* others have looked before */
            put_all(rows, by, there);
            MOVE_MARKS
        :: else
        fi;
        answer_now(what)
    }
    LATER_MARKS
}
#endif
