// A warehouse in Go: it receives orders, e.g. {"Item": "A-1"}, on dialogs, and answers or rejects them.
//
//	saf migrate --dsn postgres://…                  # the warehouse's database
//	saf service create warehouse --broker warehouse # its name in saf.toml
//	DSN=postgres://… go run .
//
// Each message is received, handled and answered in one transaction. If the process dies, the
// transaction is rolled back, and the message is received again. Only database/sql and a driver are
// needed: the functions of the schema do the rest (docs/sql-api.md).
package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log"
	"os"

	_ "github.com/lib/pq"
)

type order struct{ Item string }

const next = `SELECT message_id, coalesce(message_type, ''), body, coalesce(handle::text, '') FROM saf.receive('warehouse')`

// handle receives one message in a transaction of its own, and returns whether there was one.
func handle(ctx context.Context, db *sql.DB) (bool, error) {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return false, err
	}
	defer tx.Rollback() // does nothing after the commit
	var id, kind, handle string
	var body []byte
	switch err := tx.QueryRowContext(ctx, next).Scan(&id, &kind, &body, &handle); {
	case err == sql.ErrNoRows: // commits nonetheless: failed attempts may have been counted
		return false, tx.Commit()
	case err != nil:
		return false, err
	}
	var o order
	if kind == "saf/end-dialog" || kind == "saf/error" {
		_, err = tx.ExecContext(ctx, `SELECT saf.end_dialog($1)`, handle)
	} else if handle == "" || json.Unmarshal(body, &o) != nil {
		_, err = tx.ExecContext(ctx, `SELECT saf.reject($1, 'not an order in a dialog')`, id)
	} else {
		answer, _ := json.Marshal(map[string]string{"delivered": o.Item})
		_, err = tx.ExecContext(ctx, `SELECT saf.say($1, $2::jsonb, 'delivery')`, handle, string(answer))
	}
	if err != nil {
		return false, err
	}
	fmt.Println(kind, string(body))
	return true, tx.Commit()
}

func main() {
	db, err := sql.Open("postgres", os.Getenv("DSN"))
	if err != nil {
		log.Fatal(err)
	}
	for more := true; more; { // a service would wait here, and continue
		if more, err = handle(context.Background(), db); err != nil {
			log.Fatal(err)
		}
	}
}
