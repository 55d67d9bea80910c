-- A dialog from psql, as in the examples of SQL Server Service Broker: BEGIN DIALOG … LIFETIME 600,
-- SEND, RECEIVE, END CONVERSATION, and END CONVERSATION WITH ERROR.
--
--     export SHOP_DSN=postgresql://localhost/shop WAREHOUSE_DSN=postgresql://localhost/warehouse
--     # both are migrated and have their service, as dialog.py describes
--     psql -X "$SHOP_DSN" -f dialog.sql
--
-- docs/sql-api.md describes the functions.

\set ON_ERROR_STOP on
\getenv shop SHOP_DSN
\getenv warehouse WAREHOUSE_DSN

\echo == The shop asks
\connect :shop
BEGIN;
SELECT saf.begin_dialog('shop', 'warehouse', lifetime => '600 seconds') AS dialog \gset
SELECT saf.say(:'dialog', '{"article": "A-1", "amount": 2}'::jsonb, message_type => 'order') AS sent;
SELECT saf.begin_dialog('shop', 'warehouse', lifetime => '600 seconds', related => :'dialog') AS other \gset
SELECT saf.say(:'other', '{"article": "A-2", "amount": 200}'::jsonb, message_type => 'order') AS sent;
COMMIT;
\! saf forward --config dialog_shop.toml > /dev/null

\echo == The warehouse answers, each order in the transaction that receives it
\connect :warehouse
CREATE TABLE IF NOT EXISTS delivery (article text, amount int);
CREATE OR REPLACE PROCEDURE answer_orders() LANGUAGE plpgsql AS $$
DECLARE
    message record;
    wanted jsonb;
BEGIN
    LOOP
        SELECT * INTO message FROM saf.receive('warehouse');
        EXIT WHEN NOT FOUND;
        IF message.message_type IN ('saf/end-dialog', 'saf/error') THEN
            PERFORM saf.end_dialog(message.handle);
        ELSE
            wanted = convert_from(message.body, 'UTF8')::jsonb;
            IF (wanted ->> 'amount')::int > 100 THEN
                PERFORM saf.end_dialog(message.handle, 17, 'we do not have that many');
            ELSE
                INSERT INTO delivery VALUES (wanted ->> 'article', (wanted ->> 'amount')::int);
                PERFORM saf.say(message.handle, wanted, message_type => 'delivery');
                PERFORM saf.end_dialog(message.handle);
            END IF;
        END IF;
        COMMIT;
    END LOOP;
END $$;
CALL answer_orders();
TABLE delivery;
\! saf forward --config dialog_warehouse.toml > /dev/null

\echo == The shop receives the answers, and ends its sides
\connect :shop
BEGIN;
SELECT message_type, convert_from(body, 'UTF8') AS body, handle = :'dialog' AS first_dialog
FROM saf.receive('shop', 10) ORDER BY first_dialog DESC;
COMMIT;
BEGIN;
SELECT message_type FROM saf.receive('shop', 10);
SELECT saf.end_dialog(:'dialog');
SELECT saf.end_dialog(:'other');
COMMIT;
\! saf forward --config dialog_shop.toml > /dev/null

\connect :warehouse
CALL answer_orders();
\echo == Both sides are closed
SELECT service, state FROM saf.conversation ORDER BY created_at;
