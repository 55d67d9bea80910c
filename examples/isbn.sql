-- Two services of one database talk without a forwarder, as in the ISBN example of SQL Server Service
-- Broker: BEGIN DIALOG … LIFETIME 600, SEND, RECEIVE, END CONVERSATION.
--
--     export SHOP_DSN=postgresql://localhost/shop
--     saf migrate --dsn "$SHOP_DSN"     # saf.toml has it as [brokers.shop] and [destinations.shop]
--     for service in isbn-client isbn-lookup; do
--         saf service create $service --broker shop
--         saf route add shop --service $service --local    # see docs/conversations.md
--     done
--     psql -X "$SHOP_DSN" -f isbn.sql

\set ON_ERROR_STOP on

CREATE TABLE IF NOT EXISTS book (title text PRIMARY KEY, isbn text);
INSERT INTO book VALUES ('Transaction Processing', '978-1-55860-190-1') ON CONFLICT DO NOTHING;

\echo == The client asks
BEGIN;
SELECT saf.begin_dialog('isbn-client', 'isbn-lookup', lifetime => '600 seconds') AS dialog \gset
SELECT saf.say(:'dialog', 'Transaction Processing'::text, message_type => 'title') AS sent;
COMMIT;

\echo == The lookup answers in the transaction that receives the question, and ends its side
BEGIN;
SELECT handle, convert_from(body, 'UTF8') AS title FROM saf.receive('isbn-lookup') \gset
SELECT saf.say(:'handle', (SELECT isbn FROM book WHERE title = :'title'), message_type => 'isbn') AS sent;
SELECT saf.end_dialog(:'handle');
COMMIT;

\echo == The client receives the answer and the end, and ends its side
BEGIN;
SELECT message_type, convert_from(body, 'UTF8') AS isbn FROM saf.receive('isbn-client');
COMMIT;
BEGIN;
SELECT message_type FROM saf.receive('isbn-client');
SELECT saf.end_dialog(:'dialog');
COMMIT;

\echo == The lookup asks until it receives the End; both sides are closed
SELECT message_type FROM saf.receive('isbn-lookup');
SELECT message_type FROM saf.receive('isbn-lookup');
SELECT service, state FROM saf.conversation ORDER BY service;
