/* Batches that follow each other (saf.engine.little): a batch has only the shards with new rows.
 *
 * Writers insert rows in transactions of their own; a row is in one of two shards. The reader opens
 * a batch of all shards after a search. While it remembers the end of the last batch, it opens
 * further batches without a search: it reads what all shards have beyond that end, and writes only
 * the cursors of shards that have something. It may be killed at any time and forget that end.
 * Before a search it brings the cursors that stayed behind to that end, or does not come to it.
 *
 * Proven: each committed row is in exactly one batch, and who continues with a batch after a kill
 * finds the same rows, by the cursors alone.
 */

#ifndef WRITERS
#define WRITERS 3
#endif
#define SHARDS 2
#define BIT(n) (1 << (n))

/* transactions: numbered in the order in which they begin, from 1 */
byte next_txid = 1;
byte ended, committed;        /* sets of transactions, as bits */
byte last_ended;

/* rows: numbered by the identity, from 1 */
byte next_id = 1;
byte txid_of[WRITERS + 2], shard_of[WRITERS + 2];

/* a pg_snapshot: the transactions below xmax had ended, except those in xip */
#define SNAPSHOT(xmax, xip) \
    xmax = last_ended + 1; xip = (BIT(xmax) - 1) & ~ended & ~1
#define VISIBLE(txid, xmax, xip) ((txid) < (xmax) && !(BIT(txid) & (xip)))

#define IN_SHARD(row, shard) (shard_of[row] == (shard))

/* a cursor for each shard */
byte done_xmax[SHARDS] = 1, done_xip[SHARDS], open_xmax[SHARDS], open_xip[SHARDS];
bool is_open[SHARDS];

byte read, delivered;         /* rows, as bits: those that the opener has read, and all so far */
byte living = WRITERS;

/* Rows of a shard that are not visible in done but in the snapshot until */
inline find(rows, shard, since_xmax, since_xip, until_xmax, until_xip)
{
    row = 1;
    do
    :: row < next_id ->
        if
        :: (committed & BIT(txid_of[row])) && IN_SHARD(row, shard) &&
           !VISIBLE(txid_of[row], since_xmax, since_xip) &&
           VISIBLE(txid_of[row], until_xmax, until_xip) -> rows = rows | BIT(row)
        :: else
        fi;
        row++
    :: else -> break
    od;
    row = 0
}

proctype Writer(byte shard)
{
    byte txid;

    atomic { txid = next_txid; next_txid++ }
    atomic { txid_of[next_id] = txid; shard_of[next_id] = shard; next_id++ }
    atomic {
        if
        :: committed = committed | BIT(txid)
        :: skip                                  /* rolled back */
        fi;
        ended = ended | BIT(txid);
        if :: txid > last_ended -> last_ended = txid :: else fi;
        living--
    }
}

#define IN_HAND (is_open[0] || is_open[1])

proctype Reader()
{
    byte rows, row, shard, now_xmax, now_xip;
    byte end_xmax, end_xip;       /* of the last batch, while it is remembered */
    bool remembers;

    do
    :: d_step { !IN_HAND && !remembers ->        /* a search opens a batch of all shards */
           SNAPSHOT(now_xmax, now_xip);
           read = 0; shard = 0;
           do
           :: shard < SHARDS ->
               find(read, shard, done_xmax[shard], done_xip[shard], now_xmax, now_xip);
               open_xmax[shard] = now_xmax; open_xip[shard] = now_xip; is_open[shard] = true;
               shard++
           :: else -> break
           od;
           shard = 0
       }
    :: d_step { !IN_HAND && remembers ->         /* NEXT opens a batch of the shards with rows */
           SNAPSHOT(now_xmax, now_xip);
           read = 0; shard = 0;
           do
           :: shard < SHARDS ->
               rows = 0;
               find(rows, shard, end_xmax, end_xip, now_xmax, now_xip);
               if
               :: rows ->
                   read = read | rows;
                   done_xmax[shard] = end_xmax; done_xip[shard] = end_xip;
                   open_xmax[shard] = now_xmax; open_xip[shard] = now_xip; is_open[shard] = true
               :: else
               fi;
               shard++
           :: else -> break
           od;
           shard = 0; rows = 0
       }
    :: d_step { IN_HAND ->                       /* store what the cursors say, and close */
           rows = 0; shard = 0;
           do
           :: shard < SHARDS ->
               if
               :: is_open[shard] ->
                   find(rows, shard, done_xmax[shard], done_xip[shard],
                        open_xmax[shard], open_xip[shard]);
                   now_xmax = open_xmax[shard]; now_xip = open_xip[shard];
                   done_xmax[shard] = now_xmax; done_xip[shard] = now_xip;
                   open_xmax[shard] = 0; open_xip[shard] = 0; is_open[shard] = false
               :: else
               fi;
               shard++
           :: else -> break
           od;
           assert(rows == read);                 /* a batch never changes */
           assert((rows & delivered) == 0);      /* nothing twice */
           delivered = delivered | rows;
           end_xmax = now_xmax; end_xip = now_xip; remembers = true;
#ifdef END_IS_NOW                                /* planted: when it was closed, not opened */
           SNAPSHOT(end_xmax, end_xip);
#endif
           shard = 0; rows = 0; read = 0
       }
    :: d_step { !IN_HAND && remembers ->         /* LEVEL */
           shard = 0;
#ifdef LEVEL_TO_NOW                              /* planted: to what is there now */
           SNAPSHOT(end_xmax, end_xip);
#endif
           do
           :: shard < SHARDS ->
               done_xmax[shard] = end_xmax; done_xip[shard] = end_xip;
               shard++
           :: else -> break
           od;
           shard = 0; remembers = false; end_xmax = 0; end_xip = 0
       }
    :: d_step { remembers ->                     /* killed: another one goes on */
           remembers = false; end_xmax = 0; end_xip = 0
       }
    :: d_step { living == 0 && !IN_HAND && !remembers ->
           SNAPSHOT(now_xmax, now_xip);
           shard = 0; rows = 0;
           do
           :: shard < SHARDS ->
               find(rows, shard, done_xmax[shard], done_xip[shard], now_xmax, now_xip);
               shard++
           :: else -> break
           od;
           shard = 0
       };
       if
       :: rows == 0 -> break
       :: else -> rows = 0
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
        :: writer < WRITERS -> run Writer(writer % SHARDS); writer++
        :: else -> break
        od;
        run Reader()
    }
}
