"""Sending: what a message may be, whose transaction it is in, how a database is spoken of."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

MESSAGE, TRANSACTION, DATABASE, OUTBOX = (
    "saf/message.py",
    "saf/transaction.py",
    "saf/database/dsn.py",
    "saf/outbox.py",
)
MESSAGES, DSN = "unit/test_message.py", "unit/test_dsn.py"
ENTRANCE, SENT = "integration/test_entrance.py", "integration/test_outbox.py"

ACCEPTED = "migrations/baseline/log.sql"

MUTANTS: list[Mutant] = [
    mutant(
        "a session may write its rows on a second connection after a send",
        "saf/transaction.py",
        "        _sent_on[transaction] = connection\n",
        "",
        "contract/test_1_atomic.py::"
        "test_a_message_does_not_outlive_rows_that_a_session_writes_later_on_another_connection",
    ),
    mutant(
        "a session may have written its rows on another connection before a send",
        "saf/transaction.py",
        "            if core is not connection:\n",
        "            if False:\n",
        "contract/test_1_atomic.py::"
        "test_a_session_whose_rows_are_on_another_connection_sends_nothing",
    ),
    mutant(
        "an empty table saf.broker is no matter to a sender",
        "saf/transaction.py",
        "        if is_empty:\n",
        "        if False:\n",
        "contract/test_whole.py::"
        "test_a_broker_whose_tables_were_truncated_is_named_by_everything_that_meets_it",
    ),
    mutant(
        "bytes of an array are escaped where backslashes are",
        "saf/transaction.py",
        "        params = params and queries.in_arrays(self.connection, params)\n",
        "",
        "contract/test_unusual_databases.py::"
        "test_what_is_sent_by_any_way_is_received_as_it_was_sent[standard_conforming_strings-few]",
    ),
    mutant(
        "bytes of a copy are escaped where backslashes are",
        "saf/outbox.py",
        "in queries.in_rows(connection, rows)",
        "in rows",
        "contract/test_unusual_databases.py::"
        "test_what_is_sent_by_any_way_is_received_as_it_was_sent[standard_conforming_strings-many]",
    ),
    mutant(
        "texts come in the encoding that a database prefers",
        "saf/database/dsn.py",
        ', "client_encoding": "UTF8"}',
        "}",
        "contract/test_unusual_databases.py",
    ),
    mutant(
        "a text that quotes a dsn as it was written shows its password",
        "saf/database/dsn.py",
        "        text = text.replace(self.conninfo, str(self))\n",
        "",
        f"{DSN}::test_a_secret_is_taken_out_of_a_message_however_it_is_written_there",
    ),
    mutant(
        "a password that is quoted with its escapes is shown",
        "saf/database/dsn.py",
        'for form in (escaped, quote(secret, safe=""), secret):',
        "for form in (secret,):",
        f"{DSN}::test_a_secret_is_taken_out_of_a_message_however_it_is_written_there",
    ),
    mutant(
        "a key of any length is accepted as common",
        ACCEPTED,
        "       AND (key IS NULL OR pg_catalog.octet_length(key) OPERATOR(pg_catalog.<=) 1024)\n",
        "",
        "migration/test_accept.py::test_what_a_log_refuses_is_told_by_the_name_of_a_constraint",
    ),
    mutant(
        "a sender's own operator says what is accepted",
        ACCEPTED,
        "pg_catalog.octet_length(to_service) OPERATOR(pg_catalog.<=) 255",
        "pg_catalog.octet_length(to_service) <= 255",
        "migration/test_accept.py::test_a_sender_with_operators_of_its_own_gets_no_further",
    ),
    mutant(
        "many messages are copied although the rules of senders forbid a COPY",
        "saf/outbox.py",
        "    if forbidden:\n",
        "    if not rows:\n",
        "integration/test_senders.py::test_a_role_sends_only_as_whom_and_to_whom_its_rules_say",
    ),
    mutant(
        "a pipeline is given a COPY",
        "saf/outbox.py",
        "!= PipelineStatus.OFF",
        "== PipelineStatus.ABORTED",
        "integration/test_outbox.py::test_many_messages_are_sent_in_a_pipeline",
    ),
    mutant(
        "the caller's library does not learn that a COPY has begun its transaction",
        "saf/outbox.py",
        "    ((forbidden,),) = transaction.fetch(FORBIDDEN)\n",
        "    ((forbidden,),) = connection.execute(FORBIDDEN).fetchall()\n",
        "integration/test_outbox.py::"
        "test_a_thousand_messages_through_sqlalchemy_are_in_its_transaction",
    ),
    mutant(
        "a moment may have a zone that says nothing",
        MESSAGE,
        "if moment.utcoffset() is None:",
        "if moment.tzinfo is None:",
        MESSAGES,
    ),
    mutant(
        "a time may be any that Python has",
        MESSAGE,
        "    if not in_calendar(moment):\n        way_out",
        "    if not moment:\n        way_out",
        MESSAGES,
    ),
    mutant(
        "a dataframe's time may be any",
        "saf/spark/table/outgoing.py",
        "wrong += [pc.less(column, earliest), pc.greater_equal(column, too_late)]",
        "wrong += []",
        "contract/test_sinks.py::test_what_outbox_send_refuses_is_refused_in_the_same_words",
    ),
    mutant(
        "a content type may hold a NUL",
        MESSAGE,
        "    headers = {CONTENT_TYPE: content_type, **headers}\n"
        "    try:\n        text = write(headers)\n",
        "    try:\n        text = write({CONTENT_TYPE: content_type, **headers})\n",
        MESSAGES,
        "contract/test_webhook_inbox.py::test_what_is_not_accepted_is_answered_with_the_reason",
    ),
    mutant(
        "who sends may have any name, of an Outbox",
        OUTBOX,
        '            check_text("from_service", from_service, MAX_NAME)\n',
        "            ...\n",
        f"{SENT}::test_who_sends_has_a_name_that_a_service_can_have",
    ),
    mutant(
        "an INSERT has any number of bytes",
        "saf/outbox.py",
        "if size > LARGEST_STATEMENT and statements[-1]:",
        "if size < 0:",
        f"{SENT}::test_large_messages_are_several_statements_and_stay_in_their_order",
    ),
    mutant(
        "some of many messages are sent where each statement is a transaction",
        "saf/transaction.py",
        "if len(statements) > 1 and transaction.commits_by_itself():",
        "if len(statements) < 0:",
        f"{SENT}::test_large_messages_are_refused_where_each_statement_would_be_a_transaction",
    ),
    mutant(
        "a body of exactly the most bytes is refused",
        MESSAGE,
        "if len(body) > max_bytes:",
        "if len(body) >= max_bytes:",
        MESSAGES,
    ),
    mutant(
        "headers may be of any size",
        MESSAGE,
        "(size := _stored_size(headers)) > MAX_HEADERS:",
        "(size := _stored_size(headers)) > 2 * MAX_HEADERS:",
        f"{MESSAGES}::test_headers_larger_than_a_mebibyte_are_refused",
    ),
    mutant(
        "a name may be empty",
        MESSAGE,
        "    if not text:\n        raise InvalidMessage(field",
        "    if text is None:\n        raise InvalidMessage(field",
        MESSAGES,
    ),
    mutant(
        "headers may hold a NUL deep inside",
        MESSAGE,
        "return any(_holds_nul(item) for item in value)",
        "return False",
        MESSAGES,
    ),
    mutant(
        "a number that is none is JSON",
        MESSAGE,
        'separators=(",", ":"), allow_nan=False,',
        'separators=(",", ":"), allow_nan=True,',
        MESSAGES,
    ),
    mutant(
        "a database that was refused is accepted the next time",
        TRANSACTION,
        "        require_schema(str(name)",
        "        self._checked[transaction.database] = False\n        require_schema(str(name)",
        f"{ENTRANCE}::test_a_database_that_was_refused_is_refused_again",
    ),
    mutant(
        "databases are told by their names alone",
        "saf/database/dsn.py",
        "return (info.host, info.port, info.dbname)",
        'return ("", "", info.dbname)',
        f"{ENTRANCE}::test_databases_of_the_same_name_on_two_servers_are_two",
    ),
    mutant(
        "an engine is told by its address",
        TRANSACTION,
        "return weakref.ref(self.connection.engine)",
        "return id(self.connection.engine)",
        f"{ENTRANCE}::test_an_engine_is_not_taken_for_one_that_was_there_before_it",
    ),
    mutant(
        "a send commits by itself",
        TRANSACTION,
        "if not allow_autocommit and transaction.commits_by_itself():",
        "if allow_autocommit and transaction.commits_by_itself():",
        f"{SENT}::test_a_psycopg_connection_in_autocommit_is_refused",
    ),
    mutant(
        "each send checks the schema",
        TRANSACTION,
        "if pooled is None:",
        "if transaction is not None:",
        f"{SENT}::test_the_first_send_checks_the_schema_and_later_ones_do_not",
    ),
    mutant(
        "the outbox's own service wins over a message's",
        OUTBOX,
        "if self.from_service is not None and row.from_service is None:",
        "if self.from_service:",
        f"{SENT}::test_many_messages_keep_their_optional_fields_apart",
    ),
    mutant(
        "options are shown",
        DATABASE,
        'for secret in (*SECRETS, "options"):',
        "for secret in SECRETS:",
        DSN,
    ),
    mutant(
        "a host that does not answer is waited for",
        DATABASE,
        "            **network(self.bounds.network_seconds),\n",
        "",
        DSN,
    ),
    mutant(
        "what the dsn says of time-outs is overruled",
        DATABASE,
        "{**defaults, **self.parts,",
        "{**self.parts, **defaults,",
        DSN,
    ),
    mutant(
        "a driver's message is shown as it is",
        DATABASE,
        'text = text.replace(form, "***")',
        "text = str(text)",
        DSN,
    ),
    mutant(
        "an older schema will do",
        "saf/database/queries.py",
        "if found != REVISION:",
        "if found > REVISION:",
        f"{SENT}::test_an_older_or_newer_schema_is_refused_and_the_transaction_survives",
    ),
    mutant(
        "an instance of the package before cannot send after the migration",
        "saf/database/queries.py",
        "if sends and revision == following(REVISION):",
        "if False:",
        "migration/test_senders_before.py::"
        "test_an_instance_that_restarts_after_the_migration_sends_and_all_is_delivered",
    ),
    mutant(
        "a sender takes any newer schema",
        "saf/database/queries.py",
        "if sends and revision == following(REVISION):",
        "if sends and revision > REVISION:",
        "migration/test_senders_before.py::test_two_revisions_ahead_are_refused",
    ),
    mutant(
        "a dialog takes the next schema, as a sender does",
        "saf/transaction.py",
        "        self.sends = sends\n",
        "        self.sends = True\n",
        "migration/test_senders_before.py::test_only_an_outbox_may_be_one_revision_behind",
    ),
]
