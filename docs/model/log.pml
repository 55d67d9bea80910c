/* The log: batches between two snapshots of a cursor (saf.log.cursor).
 *
 * Writers insert rows in transactions of their own, which begin, commit and are rolled back in any
 * order. Those of the key write under one lock, as the message's business row has it. The reader
 * opens a batch, reads it twice, as a retried task would, and closes it.
 *
 * Proven: each committed row is in exactly one batch, a batch never changes, the rows of a key come
 * in the order in which they were written, and the reader comes to the end.
 */

#ifndef WRITERS
#define WRITERS 4   /* the first two write rows of one key, under its lock */
#endif
#define OF_KEY 2
#define BIT(n) (1 << (n))

/* transactions: numbered in the order in which they begin, from 1; 0 stands for nobody */
byte next_txid = 1;
byte ended, committed;        /* sets of transactions, as bits */
byte last_ended;              /* the highest that has ended: pg_snapshot_xmax is the next one */

/* rows: numbered by the identity, from 1 */
byte next_id = 1;
byte txid_of[WRITERS + 2];
bool of_key[WRITERS + 2];
byte key_lock;

/* a pg_snapshot: the transactions below xmax had ended, except those in xip */
#define SNAPSHOT(xmax, xip) \
    xmax = last_ended + 1; xip = (BIT(xmax) - 1) & ~ended & ~1
#define VISIBLE(txid, xmax, xip) ((txid) < (xmax) && !(BIT(txid) & (xip)))

/* the cursor */
byte done_xmax = 1, done_xip, open_xmax, open_xip;
bool is_open;

byte delivered;               /* rows, as bits */
byte last_of_key;
byte living = WRITERS;

/* What `Batch.select` finds now: rows of committed transactions, since done, and visible in open */
#define BEGUN_SINCE(txid) ((txid) >= done_xmax)
#define ENDED_SINCE(txid) (BIT(txid) & done_xip)
#if defined(POLL_BY_ID)                     /* planted: as most do who poll an outbox */
#define IN_BATCH(row) (row > last_id && VISIBLE(txid_of[row], open_xmax, open_xip))
#elif defined(NO_IN_PROGRESS)               /* planted: what was in progress is not looked up */
#define IN_BATCH(row) (BEGUN_SINCE(txid_of[row]) && VISIBLE(txid_of[row], open_xmax, open_xip))
#elif defined(ALL_COMMITTED)                /* planted: everything new, and no second snapshot */
#define IN_BATCH(row) (BEGUN_SINCE(txid_of[row]) || ENDED_SINCE(txid_of[row]))
#else
#define IN_BATCH(row) ((BEGUN_SINCE(txid_of[row]) || ENDED_SINCE(txid_of[row])) \
                       && VISIBLE(txid_of[row], open_xmax, open_xip))
#endif

inline find(rows)
{
    rows = 0;
    row = 1;
    do
    :: row < next_id ->
        if
        :: (committed & BIT(txid_of[row])) && IN_BATCH(row) -> rows = rows | BIT(row)
        :: else
        fi;
        row++
    :: else -> break
    od;
    row = 0
}

#ifdef NO_LOCK                              /* planted: the key's writers do not take turns */
#define LOCK(txid) skip
#else
#define LOCK(txid) atomic { key_lock == 0 -> key_lock = txid }
#endif

proctype Writer(bool keyed)
{
    byte txid;

    atomic { txid = next_txid; next_txid++ }
    if
    :: keyed -> LOCK(txid)
    :: else
    fi;
    atomic { txid_of[next_id] = txid; of_key[next_id] = keyed; next_id++ }
    atomic {
        if
        :: committed = committed | BIT(txid)
        :: skip                                  /* rolled back */
        fi;
        ended = ended | BIT(txid);
        if :: txid > last_ended -> last_ended = txid :: else fi
    }
    atomic {                                     /* locks go after the transaction has ended */
        if :: key_lock == txid -> key_lock = 0 :: else fi;
        living--
    }
}

proctype Reader()
{
    byte rows, again, row, at;
    byte last_id;

    do
    :: atomic {
           SNAPSHOT(open_xmax, open_xip);        /* OPEN */
           is_open = true
       }
       d_step { find(rows) }
       d_step {
           find(again);
           assert(rows == again);                /* a batch never changes */
       }
       d_step {
           assert((rows & delivered) == 0);      /* nothing twice */
           delivered = delivered | rows;
           at = 1;
           do
           :: at < next_id ->
               if
               :: (rows & BIT(at)) ->
                   last_id = (at > last_id -> at : last_id);
                   if
                   :: of_key[at] ->
                       assert(at > last_of_key); /* order */
                       last_of_key = at
                   :: else
                   fi
               :: else
               fi;
               at++
           :: else -> break
           od;
           at = 0; rows = 0; again = 0
       }
       d_step {
           done_xmax = open_xmax; done_xip = open_xip;   /* CLOSE */
           is_open = false; open_xmax = 0; open_xip = 0
       }
       /* a poll that finds nothing new writes nothing, so wait for what may be new */
       if
       :: done_xmax != last_ended + 1 || (done_xip & ended)
       :: living == 0 && done_xmax == last_ended + 1 && !(done_xip & ended) -> break
       fi
    od;
    skip;
    d_step {
        row = 1;
        do
        :: row < next_id ->
            assert(!(committed & BIT(txid_of[row])) || (delivered & BIT(row)));  /* nothing lost */
            row++
        :: else -> break
        od;
        row = 0
    }
}

init
{
    atomic {
        byte writer = 0;
        do
        :: writer < WRITERS -> run Writer(writer < OF_KEY); writer++
        :: else -> break
        od;
        run Reader()
    }
}
