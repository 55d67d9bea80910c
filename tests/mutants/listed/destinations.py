"""Destinations: another broker's inbox, and what it says of what it takes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

INBOX, PLACES = "saf/destinations/postgresql/inbox.py", "saf/destinations/places.py"
FOLDER = "saf/destinations/jsonl/folder.py"
SQLSTATES = "saf/database/sqlstates.py"
WATERMARKS, ISOLATED, CRASH = (
    "contract/test_watermarks.py",
    "contract/test_7_isolated.py",
    "contract/test_set_aside_crash.py",
)
HONEST, FAULTS = "contract/test_10_honest.py", "contract/test_destination_faults.py"
SCRIPT, STREAMS = "saf/destinations/redis/script.py", "saf/destinations/redis/streams.py"
NATS, KAFKA = "contract/test_nats.py", "contract/test_kafka.py"
RABBITMQ, RABBITMQ_STREAM = "contract/test_rabbitmq_stream.py", "saf/destinations/rabbitmq_stream"
QUEUES = "contract/test_rabbitmq.py"
OBJECTS, CHECK = "contract/test_object_stores.py", "integration/test_destination_check.py"
DELTA, LAKE = "saf/destinations/delta", "contract/test_delta.py"
ICEBERG, BERG = "saf/destinations/iceberg", "contract/test_iceberg.py"
REDIS, ROUTED = "contract/test_redis.py", "contract/test_redis_routed.py"

MUTANTS: list[Mutant] = [
    mutant(
        "a wait that could not be ended for want of descriptors goes on for ever",
        "saf/database/bounds.py",
        "            if error.errno in (errno.EMFILE, errno.ENFILE):",
        "            if False:",
        "unit/test_patience.py::"
        "test_a_wait_that_cannot_be_ended_for_want_of_descriptors_is_ended_later",
    ),
    mutant(
        "what others write into a stream ends a comparison",
        "saf/destinations/mapping.py",
        "        with suppress(UnicodeDecodeError):",
        "        with suppress(KeyError):",
        "contract/test_redis.py::test_what_others_write_into_its_streams_is_passed_over",
    ),
    mutant(
        "a server of NATS that pings is waited for without end",
        "saf/destinations/nats/connection.py",
        "async with asyncio.timeout(self._seconds):",
        "async with asyncio.timeout(None):",
        "contract/test_nats_places.py::"
        "test_a_server_that_pings_and_does_not_answer_is_not_waited_for_without_end",
    ),
    mutant(
        "a right that lacks in a cluster of Redis is taken for a server that is away",
        "saf/destinations/redis/server.py",
        "        if isinstance(inner, redis.exceptions.NoPermissionError):",
        "        if False:",
        "contract/test_redis_places.py::"
        "test_in_a_cluster_the_rights_that_the_page_lists_are_enough_and_one_that_lacks_is_named",
    ),
    mutant(
        "a doctor takes any destination for one that holds messages",
        "saf/operating/doctor/messages.py",
        "not settings.capabilities.holds",
        "settings.capabilities.holds",
        "contract/test_given_early.py::"
        "test_a_route_and_a_run_say_that_a_destination_holds_no_message",
    ),
    mutant(
        "a plan routes messages for later to files, without a word",
        "saf/cli/apply.py",
        'change.table.name == "routes" and change.action == "create"',
        'change.table.name == "routes" and change.action == "remove"',
        "contract/test_given_early.py::"
        "test_a_route_and_a_run_say_that_a_destination_holds_no_message",
    ),
    mutant(
        "nobody hears of what went before its deliver_at",
        "saf/engine/storing.py",
        "if holds or times.null_count == len(times):",
        "if True:",
        "contract/test_given_early.py::"
        "test_a_run_counts_what_went_before_its_time_to_a_destination_that_holds_none",
    ),
    mutant(
        "what a client raises is the fault of each message",
        "saf/engine/destination_sessions.py",
        """            with self._blamed(name):
                return known, ask(destination, chunk)
        except Ahead""",
        """            if True:
                return known, ask(destination, chunk)
        except Ahead""",
        f"{FAULTS}::test_what_a_client_raises_makes_no_dead_letters_and_delays_nobody_else",
    ),
    mutant(
        "a destination that rejects everything is given everything",
        "saf/engine/context.py",
        "if messages < self.most or",
        "if True or",
        f"{FAULTS}::"
        "test_more_than_a_few_rejections_in_a_row_stop_a_destination_until_an_operator_lifts_it",
    ),
    mutant(
        "rejections in a row are forgotten by the next run",
        "saf/forwarding/broker.py",
        "        self._rejecting = dict(rejecting)\n",
        "",
        f"{FAULTS}::"
        "test_rejections_in_a_row_are_counted_over_runs_and_a_stored_message_ends_the_row",
    ),
    mutant(
        "a stop is not heard between halves",
        "saf/engine/storing.py",
        "if self.context.told_to_stop():",
        "if False:",
        f"{FAULTS}::test_a_stop_is_heard_between_the_halves_of_what_is_rejected",
    ),
    mutant(
        "a destination that is down for a moment is not asked again",
        "saf/engine/destination_sessions.py",
        "found.error if isinstance(found, Refusal) else None",
        "None",
        f"{FAULTS}::test_a_client_that_raised_is_opened_anew_for_the_next_attempt",
    ),
    mutant(
        "a stop is asked about between a refusal and what takes its place",
        "saf/engine/storing.py",
        "if not left and pending and stops():",
        "if pending and stops():",
        "unit/test_work_list.py",
    ),
    mutant(
        "a destination that names no message is asked for ever",
        "saf/engine/storing.py",
        "case UnknownService() if names_rows:",
        "case UnknownService():",
        "unit/test_work_list.py",
    ),
    mutant(
        "a destination that cannot say which it is makes dead letters",
        "saf/engine/destination_sessions.py",
        """        with self._blamed(name):
            if name not in self._open:""",
        """        if True:
            if name not in self._open:""",
        "contract/test_destination_faults.py::"
        "test_a_client_that_raises_when_it_is_asked_which_it_is_makes_no_dead_letters",
    ),
    mutant(
        "a broker that is being restored in place makes dead letters",
        INBOX,
        "services, *columns = the_row(contact, self.dsn.database)",
        "services, *columns = contact[0]",
        f"{WATERMARKS}::test_a_destination_whose_broker_is_being_restored_in_place_is_refused_and_rejects_nothing",
    ),
    mutant(
        "a state of a folder that is damaged makes dead letters",
        "saf/destinations/jsonl/__init__.py",
        "        with readable(what, str(file), CURE):\n",
        "        if True:\n",
        "contract/test_jsonl.py::test_what_is_wrong_with_its_own_files_makes_no_dead_letters",
    ),
    mutant(
        "a property of a table that is damaged makes dead letters",
        f"{ICEBERG}/marks.py",
        "        raise MarksDamaged(name) from None\n",
        "        raise\n",
        f"{BERG}::test_marks_that_somebody_has_written_make_no_dead_letters",
    ),
    mutant(
        "a table that is altered while a task has it makes dead letters",
        f"{ICEBERG}/table.py",
        "if table is None or _shape(table) != _shape(opened.table):",
        "if table is None:",
        f"{BERG}::test_a_table_that_is_altered_while_a_task_has_it_is_looked_at_again",
    ),
    mutant(
        "marks that somebody has written make dead letters",
        "saf/destinations/stepwise.py",
        '        with readable(self.what, "its marks", CURE):\n',
        "        if True:\n",
        f"{REDIS}::test_marks_that_somebody_has_written_make_no_dead_letters",
    ),
    mutant(
        "the name of a folder of messages is not durable",
        "saf/log/disk.py",
        "        sync(path.parent)\n",
        "        pass\n",
        "contract/test_jsonl.py::"
        "test_the_names_of_its_folders_are_durable_before_a_message_counts_as_stored",
    ),
    mutant(
        "an address may have a host that no resolver takes",
        "saf/destinations/addresses.py",
        '        host.encode("idna")\n',
        "        pass\n",
        "unit/test_addresses.py::test_what_cannot_be_the_name_of_a_host_is_refused",
    ),
    mutant(
        "a Redis cluster that cannot be reached stops its source",
        "saf/destinations/redis/server.py",
        "except (RedisError, RedisClusterException, OSError) as error:",
        "except (RedisError, OSError) as error:",
        "contract/test_redis_places.py::test_a_cluster_that_cannot_be_reached_or_is_asked_as_one_server_says_so",
    ),
    mutant(
        "of one node of a Redis cluster, nobody learns what to say",
        "saf/destinations/redis/server.py",
        'code = "" if settings.address.found_by == "cluster" else "MOVED"',
        "pass",
        "contract/test_redis_places.py::test_a_cluster_that_cannot_be_reached_or_is_asked_as_one_server_says_so",
    ),
    mutant(
        "a login at an Iceberg catalog is waited for without a bound",
        "saf/database/pinned.py",
        "manager(self._bounded(session))",
        "manager(session)",
        "contract/test_iceberg.py::test_a_rest_catalog_that_says_nothing_at_a_login_or_no_catalogs_answer_is_unavailable",
    ),
    mutant(
        "an answer that is no catalog's is a message's fault",
        "saf/destinations/iceberg/link.py",
        "RESTError, ValidationError, ValidationException",
        "RESTError, ValidationException",
        "contract/test_iceberg.py::test_a_rest_catalog_that_says_nothing_at_a_login_or_no_catalogs_answer_is_unavailable",
    ),
    mutant(
        "an answer of the NATS server itself is taken for a stream's",
        "saf/destinations/nats/connection.py",
        'if status(answer) == "503":',
        "if False:",
        "contract/test_nats.py::test_an_answer_of_the_server_itself_is_none_of_who_listens",
    ),
    mutant(
        "who is not told how a new topic got its identity gives up",
        "saf/destinations/kafka/server.py",
        "passing(FENCED | UNDECIDED if",
        "passing(FENCED if",
        "contract/test_kafka.py::test_a_new_destination_gets_its_identity_though_the_broker_does_not"
        "_know_who_has_given_it_one",
    ),
    mutant(
        "a commit to a table does not say the epochs of its shards",
        f"{DELTA}/table.py",
        "transactions(change.source, change.moved, change.epochs)",
        "transactions(change.source, change.moved, {})",
        f"{LAKE}::test_a_new_owner_that_stores_before_the_commit_fences_it",
    ),
    mutant(
        "files of a commit that failed stay",
        f"{DELTA}/table.py",
        "        opened.files.remove(file.path for file in added)\n",
        "",
        f"{LAKE}::test_a_new_owner_that_stores_before_the_commit_fences_it",
    ),
    mutant(
        "readers of a table expect the least value of each column",
        f"{DELTA}/table.py",
        '    "delta.dataSkippingStatsColumns": ",".join(COUNTED),\n',
        "",
        f"{LAKE}::test_a_query_by_any_column_finds_its_rows",
    ),
    mutant(
        "marks in checkpoints are not read",
        f"{DELTA}/files.py",
        "                self._numbers |= self._of_checkpoint(path)\n",
        "                pass\n",
        f"{LAKE}::test_marks_are_kept_by_checkpoints",
    ),
    mutant(
        "a table without its files is another one",
        f"{DELTA}/link.py",
        "return uuid5(NAMESPACE_URL, folder.resolve().as_uri() if folder else self.settings.table)",
        "import uuid; return uuid.uuid4()",
        f"{LAKE}::test_a_table_that_is_gone_is_not_taken_for_a_new_one",
    ),
    mutant(
        "a table's folder is made where it is not mounted",
        f"{DELTA}/files.py",
        "if file.parent != self._folder and not file.parent.exists():",
        "if not file.parent.exists():",
        f"{LAKE}::test_a_table_that_is_taken_away_before_the_commit_gets_the_messages_later",
    ),
    mutant(
        "a client tries a commit again with the marks that it was given",
        f"{ICEBERG}/table.py",
        '{**table.properties, TableProperties.COMMIT_NUM_RETRIES: "0"}',
        "{**table.properties}",
        f"{BERG}::test_a_new_owner_that_stores_before_the_commit_fences_it",
    ),
    mutant(
        "files of a commit that came too late stay",
        f"{ICEBERG}/table.py",
        "                    table.io.delete(file.file_path)\n",
        "                    pass\n",
        f"{BERG}::test_a_new_owner_that_stores_before_the_commit_fences_it",
    ),
    mutant(
        "marks count that were rolled back",
        f"{ICEBERG}/marks.py",
        "if oldest.snapshot_id == snapshot:",
        "if True:",
        f"{BERG}::test_a_table_that_was_rolled_back_is_refused_and_gets_again_what_it_has_lost",
    ),
    mutant(
        "marks that were rolled back count once others have committed",
        f"{ICEBERG}/table.py",
        "repairs = put_right(table.metadata)",
        "repairs: dict[str, str | None] = {}",
        f"{BERG}::test_marks_that_were_rolled_back_do_not_count_again_once_others_have_committed",
    ),
    mutant(
        "marks go with their snapshots",
        f"{ICEBERG}/marks.py",
        "if _number(oldest) > sequence:",
        "if False:",
        f"{BERG}::test_marks_stay_when_their_snapshots_have_expired",
    ),
    mutant(
        "what nobody knows counts",
        f"{ICEBERG}/marks.py",
        "if _number(oldest) > sequence:",
        "if True:",
        f"{BERG}::test_a_rollback_whose_marks_have_expired_is_refused_and_a_way_out_is_named",
    ),
    mutant(
        "folders of a table are made where it is not mounted",
        f"{ICEBERG}/link.py",
        "folder.mkdir(exist_ok=True)",
        "folder.mkdir(parents=True, exist_ok=True)",
        f"{BERG}::test_a_table_that_is_taken_away_before_the_commit_gets_the_messages_later",
    ),
    mutant(
        "watermarks are read without a lock",
        INBOX,
        "batch DESC LIMIT 1 FOR UPDATE",
        "batch DESC LIMIT 1",
        f"{WATERMARKS}::"
        "test_of_two_that_store_the_same_chunk_at_the_same_time_the_second_stores_nothing",
    ),
    mutant(
        "first watermarks are made side by side",
        INBOX,
        "            cursor.ask(TAKE_TURN)\n",
        "",
        f"{WATERMARKS}::test_first_watermarks_are_made_by_one_delivery_at_a_time",
    ),
    mutant(
        "the moment of a batch loses its time zone",
        INBOX,
        "mark.opened_at and mark.opened_at.isoformat()",
        "mark.opened_at and mark.opened_at.replace(tzinfo=None).isoformat()",
        f"{WATERMARKS}::test_a_batch_is_the_same_one_whatever_the_time_zones_of_its_databases",
    ),
    mutant(
        "the watermark does not move where everything was stored before",
        INBOX,
        "            self._move_watermarks(cursor",
        "            if rows.num_rows:\n                self._move_watermarks(cursor",
        f"{WATERMARKS}::"
        "test_the_owner_before_is_fenced_also_where_the_new_one_found_everything_stored",
    ),
    mutant(
        "an older epoch is not refused",
        PLACES,
        "if epoch > own[shard]]",
        "if epoch > own[shard] + 1000]",
        "contract/test_5_fenced.py::"
        "test_a_zombie_cannot_write_at_the_destination_after_the_new_owner_did",
    ),
    mutant(
        "an owner before is fenced in the same lane only",
        PLACES,
        "return sorted({*places, *((MAIN, shard) for _, shard in places)})",
        "return sorted(places)",
        "contract/test_at_most_once_in_doubt.py::"
        "test_a_zombie_sends_nothing_of_a_lane_after_what_the_new_owner_has_sent",
    ),
    mutant(
        "what is stored is stored again",
        INBOX,
        "rows = beyond(rows, chunk.batch.number, stored, chunk.prefix)",
        "rows = chunk.rows",
        "contract/test_5_fenced.py::"
        "test_a_zombie_that_is_first_at_the_destination_still_duplicates_nothing",
    ),
    mutant(
        "a row at the watermark is stored again",
        PLACES,
        "(ids > position)",
        "(ids >= position)",
        f"{WATERMARKS}::"
        "test_of_two_that_store_the_same_chunk_at_the_same_time_the_second_stores_nothing",
    ),
    mutant(
        "at least once moves the position",
        "saf/engine/destination_sessions.py",
        'or "", AGAIN)',
        'or "", "")',
        f"{WATERMARKS}::test_at_least_once_raises_the_epoch_and_leaves_the_position",
    ),
    mutant(
        "a chunk with an unknown service moves the position",
        INBOX,
        "moved = {} if brokers or unknown else",
        "moved = {} if brokers else",
        f"{ISOLATED}::test_messages_for_a_service_that_the_destination_does_not_know_wait_for_it",
    ),
    mutant(
        "a chunk with an unknown service is stored",
        INBOX,
        "if rows.num_rows and not (brokers or unknown):",
        "if rows.num_rows and not brokers:",
        f"{ISOLATED}::test_messages_for_a_service_that_the_destination_does_not_know_wait_for_it",
    ),
    mutant(
        "a source that was set back is not noticed",
        PLACES,
        "if difference.ahead:",
        "if difference.ahead and not chunk.rows.num_rows:",
        f"{HONEST}::"
        "test_a_source_set_back_to_an_older_backup_is_refused_by_the_destination_until_rebased",
    ),
    mutant(
        "a batch of the same number is the same batch",
        "saf/destinations/marks.py",
        "if mark.opened_at is not None and mark.opened_at == in_hand.opened_at:",
        "if mark.batch == in_hand.batch:",
        f"{HONEST}::"
        "test_a_source_set_back_to_an_older_backup_is_refused_by_the_destination_until_rebased",
    ),
    mutant(
        "the destination acknowledges what it may lose",
        "saf/destinations/postgresql/little.py",
        "THEN set_config('synchronous_commit', 'on', false) END",
        "THEN current_setting('synchronous_commit') END",
        "contract/test_6_durable.py::test_a_destination_commits_durably_whatever_its_default",
    ),
    mutant(
        "what is wrong with the server makes dead letters",
        SQLSTATES,
        '"44", "54", "P0")',
        '"44", "54", "P0", "25", "42", "55", "XX")',
        f"{CRASH}::"
        "test_what_is_wrong_with_the_destination_and_not_with_a_message_makes_no_dead_letters",
    ),
    mutant(
        "what is wrong with a message is taken for the server's fault",
        SQLSTATES,
        '("09", "22", "23",',
        '("09", "22",',
        f"{ISOLATED}::test_a_rejected_message_becomes_a_dead_letter_and_its_neighbours_are_delivered",
    ),
    mutant(
        "a destination's error shows the password",
        INBOX,
        "reason = self.dsn.reason(error)",
        "reason = str(error)",
        f"{WATERMARKS}::test_what_a_destination_says_of_messages_is_shown_without_the_password",
    ),
    mutant(
        "a destination that has become another broker is taken for what it was",
        INBOX,
        "if self._identity not in (None, identity):",
        "if identity is None:",
        "contract/test_connections.py::"
        "test_a_broker_that_has_become_another_one_meanwhile_is_noticed",
    ),
    mutant(
        "a connection leads to the database that the one before it was for",
        "saf/database/bulk.py",
        "database.set_options(uri=uri)",
        "database.set_options()",
        "contract/test_connections.py::"
        "test_connections_that_are_made_at_once_lead_to_the_databases_that_were_meant",
    ),
    mutant(
        "a connection that was quiet for long is trusted",
        "saf/database/bulk.py",
        "recent = time.monotonic() - self._heard_at <= TRUSTED_SECONDS",
        "recent = True",
        "contract/test_connections.py::"
        "test_a_connection_that_was_quiet_for_a_while_is_asked_before_it_is_used",
    ),
    mutant(
        "a connection whose socket nobody knows is looked at by another one's",
        "saf/database/bulk.py",
        "if recent and len(self._descriptors) == 1 and not",
        "if recent and not",
        "contract/test_connections.py::"
        "test_a_connection_that_was_opened_beside_another_one_is_asked_before_it_is_used",
    ),
    mutant(
        "a connection that the server has closed is taken for a good one",
        "saf/database/bounds.py",
        "return bool(poller.poll(0))",
        "return False and bool(poller.poll(0))",
        "contract/test_connections.py::test_what_the_server_has_cut_meanwhile_costs_no_message",
    ),
    mutant(
        "a little cycle asks an inbox about its services by itself",
        INBOX,
        "        services, watermarks = self._contact(cursor, values)\n        if",
        "        cursor.ask(SCHEMA_REVISION)\n"
        "        services, watermarks = self._contact(cursor, values)\n        if",
        "contract/test_round_trips.py::test_a_cycle_with_a_task_takes_few_round_trips",
    ),
    mutant(
        "a destination of another schema is written to",
        INBOX,
        "        require_revision(self.dsn.database, revision)\n",
        "",
        "contract/test_connections.py::test_a_schema_that_has_changed_meanwhile_is_noticed",
    ),
    mutant(
        "a folder forgets which file has no name yet",
        FOLDER,
        "            self._publish(source, state)\n            yield state",
        "            yield state",
        "contract/test_jsonl.py::test_what_a_killed_writer_has_not_named_is_named_by_the_next_one",
    ),
    mutant(
        "a folder's marks are moved before its messages are there",
        FOLDER,
        "verdict.rows if verdict.wrong is None else None",
        "None",
        "contract/test_jsonl.py::test_messages_are_lines_in_their_order_and_each_is_there_once",
    ),
    mutant(
        "what a destination that cannot be read back may have is taken for lost",
        "saf/operating/repair/reconcile/__init__.py",
        '"not_compared" if unread.may_have(one) else "lost"',
        '"lost"',
        "contract/test_jsonl.py::test_what_readers_have_deleted_is_not_taken_for_lost",
    ),
    mutant(
        "a script stores whatever the marks are",
        SCRIPT,
        "~= expected then return 0 end",
        "~= expected then at = at end",
        REDIS,
    ),
    mutant(
        "a script does not move the marks",
        SCRIPT,
        "call('HSET', KEYS[1], one[1], one[2])",
        "call('HSET', KEYS[1], one[1], '')",
        REDIS,
    ),
    mutant(
        "a key that is no stream is met in the middle",
        SCRIPT,
        "if type ~= 'stream' and type ~= 'none' then",
        "if false then",
        f"{ROUTED}::test_a_key_that_is_no_stream_is_named_and_nothing_stored",
    ),
    mutant(
        "each step has the marks of the whole chunk",
        "saf/destinations/stepwise.py",
        "(verdict.moved if last else",
        "(verdict.moved if True else",
        REDIS,
    ),
    mutant(
        "a mark is set whatever it was",
        "saf/destinations/nats/batches.py",
        "headers = {EXPECTED: previous.sequence, STORED: stored, **link.kept()}",
        "headers = {STORED: stored, **link.kept()}",
        NATS,
    ),
    mutant(
        "marks are forgotten by age",
        "saf/destinations/nats/server.py",
        'kept = {TTL: "never"} if config.get("allow_msg_ttl") else {}',
        "kept: dict[str, str] = {}",
        f"{NATS}::test_marks_outlive_the_messages_that_the_stream_forgets_by_age",
    ),
    mutant(
        "messages that were removed from a stream are taken for lost",
        "saf/destinations/nats/batches.py",
        "if (missing := moment.stored - moment.found) > 0:",
        "if (missing := 0) > 0:",
        f"{NATS}::test_marks_outlive_the_messages_that_the_stream_forgets_by_age",
    ),
    mutant(
        "a batch has marks of all lanes, however many",
        "saf/destinations/nats/batches.py",
        "few = len(all_places) <= MANY_PLACES",
        "few = len(all_places) <= MANY_PLACES * 9",
        f"{NATS}::test_there_may_be_more_lanes_than_a_batch_has_room_for",
    ),
    mutant(
        "a message that no queue takes is stored, for all that is said",
        "saf/destinations/rabbitmq/server.py",
        "        if returned:\n",
        "        if returned and False:\n",
        f"{QUEUES}::test_what_no_queue_takes_is_a_dead_letter_and_its_neighbours_are_there_once",
    ),
    mutant(
        "neighbours of a message that no queue takes are sent again",
        "saf/destinations/rabbitmq/queues.py",
        "            self._there.update("
        "row for row, id_ in confirmed if id_ not in error.returned)\n",
        "",
        f"{QUEUES}::test_what_no_queue_takes_is_a_dead_letter_and_its_neighbours_are_there_once",
    ),
    mutant(
        "what a queue has taken before it was full is sent again",
        "saf/destinations/rabbitmq/queues.py",
        "except NotAll as error:",
        "except NotTaken as error:",
        f"{QUEUES}::test_what_a_queue_takes_of_a_chunk_that_it_refuses_in_part_is_not_sent_again",
    ),
    mutant(
        "what a queue has taken before it was full is sent again by the next run",
        "saf/engine/storing.py",
        "if refusal.stored is not None:",
        "if False:",
        f"{QUEUES}::test_a_queue_that_takes_less_than_a_chunk_gets_each_message_once_run_by_run",
    ),
    mutant(
        "what other queues have taken behind a full one is sent again by the next run",
        "saf/engine/task.py",
        "(first is None or taken > first)",
        "(first is None)",
        f"{QUEUES}::"
        "test_queues_get_each_message_once_while_another_one_of_their_destination_is_full",
    ),
    mutant(
        "a blind replay leaves out copies of messages that wait for other destinations",
        "saf/operating/repair/send_again.py",
        'elif "" not in held:',
        'elif "" in held:',
        "contract/test_https.py::"
        "test_one_that_was_set_back_gets_a_topics_messages_again_that_wait_for_others",
    ),
    mutant(
        "a blind replay does not say what was purged since then",
        "saf/operating/repair/send_again.py",
        "until = purged or span.since",
        "until = span.since",
        "contract/test_https.py::"
        "test_one_that_was_set_back_to_before_what_was_purged_since_says_which_time_is_missing",
    ),
    mutant(
        "of two messages that say the same id, a full queue gets one",
        "saf/destinations/rabbitmq/queues.py",
        "for key in chunk.rows[number].to_pylist()",
        'for key in chunk.rows["message_id"].to_pylist()',
        f"{QUEUES}::test_two_messages_that_say_the_same_id_both_come_although_the_queue_was_full",
    ),
    mutant(
        "what was confirmed before a connection broke is sent again",
        "saf/destinations/rabbitmq/server.py",
        "confirmed[rest], returned = sending.taken, returned | sending.returned",
        "returned = returned | sending.returned",
        f"{QUEUES}::test_what_was_confirmed_before_the_connection_broke_is_not_sent_again",
    ),
    mutant(
        "what a full queue has taken at most once is a dead letter as well",
        "saf/engine/storing.py",
        "if refusal.stored is not None:",
        "if refusal.stored is not None and not once:",
        f"{QUEUES}::test_what_a_full_queue_has_taken_at_most_once_is_no_dead_letter",
    ),
    mutant(
        "beside a message that no queue takes, what a full queue has taken comes again",
        "saf/engine/storing.py",
        "if refusal.stored is not None:",
        "if refusal.stored is not None and not isinstance(error, Rejected):",
        f"{QUEUES}::test_beside_a_message_that_no_queue_takes_a_full_queue_gets_each_one_once",
    ),
    mutant(
        "an attempt at a lane that moves counts although it was not due",
        "saf/setaside/backoff.py",
        "({THESE})\n  AND next_attempt_at <= now()\n",
        "({THESE})\n",
        "contract/test_set_aside_once.py::"
        "test_a_lane_that_moves_waits_no_longer_and_one_that_was_not_due_stays_as_it_is",
    ),
    mutant(
        "a queue that takes some at each attempt is tried ever more seldom",
        "saf/setaside/backoff.py",
        "    if moving:\n",
        "    if moving and False:\n",
        f"{QUEUES}::test_a_queue_that_keeps_taking_some_is_tried_again_soon",
    ),
    mutant(
        "later messages overtake one that a queue has refused",
        "saf/destinations/rabbitmq/server.py",
        "            sending.full = True\n",
        "",
        f"{QUEUES}::test_no_message_overtakes_one_that_a_full_queue_refuses_if_one_goes_at_a_time",
    ),
    mutant(
        "a host that accepts and does not greet holds up a healthy cluster",
        "saf/destinations/addresses.py",
        "        except errors:\n            continue\n",
        "        except ConnectionRefusedError:\n            continue\n",
        "contract/test_nats_places.py::test_a_host_that_is_stopped_before_it_greets_leaves_its_turn_to_the_next_one",
    ),
    mutant(
        "messages are gone with their server",
        "saf/destinations/rabbitmq/queues.py",
        'PERSISTENT = b"\\2"',
        'PERSISTENT = b"\\1"',
        f"{QUEUES}::test_what_was_confirmed_outlives_the_server",
    ),
    mutant(
        "a queue that refuses a message has it",
        "saf/destinations/rabbitmq/server.py",
        "if answer.INDEX == NACK:",
        "if answer.INDEX == -NACK:",
        f"{QUEUES}::test_a_queue_that_is_full_lets_messages_wait_and_loses_none",
    ),
    mutant(
        "an owner before is not fenced",
        "saf/destinations/kafka/transactions.py",
        "                link.producer(self._name(source, rival))\n",
        "",
        f"{KAFKA}::test_a_transaction_of_the_owner_before_that_is_still_open_is_never_stored",
    ),
    mutant(
        "marks are not read again after an owner was fenced",
        "saf/destinations/kafka/transactions.py",
        "reached = log.read(PATIENCE_SECONDS)",
        "reached = True",
        f"{KAFKA}::test_what_was_stored_by_an_owner_while_it_is_being_fenced_is_not_stored_again",
    ),
    mutant(
        "what was stored before its owner was fenced is stored again",
        "saf/destinations/kafka/transactions.py",
        "success = self._is_there(link, source, step)",
        "pass",
        f"{KAFKA}::test_what_was_stored_just_before_its_owner_was_fenced_is_not_stored_again",
    ),
    mutant(
        "marks are read up to the first open transaction",
        "saf/destinations/kafka/server.py",
        "isolation_level=IsolationLevel.READ_UNCOMMITTED",
        "isolation_level=IsolationLevel.READ_COMMITTED",
        f"{KAFKA}::test_marks_behind_an_open_transaction_of_another_source_are_waited_for",
    ),
    mutant(
        "keys go where librdkafka's own hash says",
        "saf/destinations/kafka/transactions.py",
        '"partitioner": "murmur2_random"',
        '"partitioner": "consistent_random"',
        f"{KAFKA}::test_the_same_key_goes_to_the_partition_that_java_would_choose",
    ),
    mutant(
        "records that were removed are taken for lost",
        "saf/destinations/kafka/transactions.py",
        "                if first:",
        "                if first < 0:",
        f"{KAFKA}::test_what_was_removed_is_not_taken_for_lost",
    ),
    mutant(
        "batches are larger than a topic takes",
        "saf/destinations/kafka/transactions.py",
        "if (least := min([BATCH_BYTES, *limits.values()])) < self._batch_bytes:",
        "if (least := min([BATCH_BYTES, *limits.values()])) < 0:",
        f"{KAFKA}::test_what_a_topic_does_not_take_is_rejected_before_anything_is_stored",
    ),
    mutant(
        "publishing ids rise with the rows only",
        f"{RABBITMQ_STREAM}/journal.py",
        "<< ROW_BITS) | rows",
        "<< 0) * 0 + rows",
        f"{RABBITMQ}::test_later_batches_come_later_whatever_their_rows_and_however_many_there_are",
    ),
    mutant(
        "a publisher has no generations",
        f"{RABBITMQ_STREAM}/journal.py",
        'name = f"{source}/{shard}/{lane}/{generation}"',
        'name = f"{source}/{shard}/{lane}/0"',
        f"{RABBITMQ}::test_later_batches_come_later_whatever_their_rows_and_however_many_there_are",
    ),
    mutant(
        "each owner has publishers of its own",
        f"{RABBITMQ_STREAM}/streams.py",
        'publisher(chunk.source, places[index], generation) if exactly_once else "",',
        "publisher(chunk.source, places[index], chunk.batch.epochs[0][1]),",
        f"{RABBITMQ}::test_of_two_that_come_first_at_the_same_time_both_are_there_once",
    ),
    mutant(
        "a batch is not said to be begun",
        f"{RABBITMQ_STREAM}/streams.py",
        "                journal.begin(numbered.begun)\n",
        "",
        f"{RABBITMQ}::"
        "test_a_batch_of_an_earlier_life_of_its_source_is_noticed_even_without_its_mark",
    ),
    mutant(
        "a batch that was begun counts, though nothing of it is there",
        f"{RABBITMQ_STREAM}/journal.py",
        "return publishing_id >> ROW_BITS >= batch",
        "return True or publishing_id >> ROW_BITS >= batch",
        f"{RABBITMQ}::test_a_batch_that_was_begun_and_never_sent_is_no_mark",
    ),
    mutant(
        "a chunk has as many publishers as it has",
        f"{RABBITMQ_STREAM}/streams.py",
        "        for first in range(0, len(publishers), MOST):\n"
        "            batch = publishers[first : first + MOST]",
        "        for first in range(0, len(publishers), 1 << 20):\n"
        "            batch = publishers[first : first + (1 << 20)]",
        f"{RABBITMQ}::test_there_may_be_more_lanes_than_a_connection_has_publishers",
    ),
    mutant(
        "messages that a limit has removed from a stream are taken for lost",
        f"{RABBITMQ_STREAM}/streams.py",
        "            if missing := _read(link.connection, stream, held):",
        "            if (missing := _read(link.connection, stream, held)) and False:",
        f"{RABBITMQ}::test_what_the_stream_has_removed_is_not_taken_for_lost",
    ),
    mutant(
        "the journal is always read from its beginning",
        f"{RABBITMQ_STREAM}/journal.py",
        "        self.connection.keep_offset(CARRIED, self.stream, first)\n",
        "",
        f"{RABBITMQ}::test_the_journal_is_read_from_where_all_was_written_anew",
    ),
    mutant(
        "replicas are not waited for",
        STREAMS,
        "        if count < required:",
        "        if count < 0:",
        f"{REDIS}::test_nothing_is_stored_while_too_few_replicas_follow",
    ),
    mutant(
        "a chunk is stored again and again while no replica follows",
        STREAMS,
        '            self._wait_for_replicas(connection, "earlier writes")\n',
        "",
        f"{REDIS}::test_nothing_is_stored_while_too_few_replicas_follow",
    ),
    mutant(
        "replicas are waited for without a write",
        STREAMS,
        'written = ("SET", script.waited(self.settings.hash_tag), "")',
        'written = ("GET", script.waited(self.settings.hash_tag))',
        f"{REDIS}::test_what_was_stored_before_is_waited_for_by_a_write",
    ),
    mutant(
        "a server without its data is another one",
        "saf/destinations/redis/server.py",
        'return uuid5(NAMESPACE_URL, f"{self.settings.server}#{self.settings.hash_tag}")',
        "import uuid; return uuid.uuid4()",
        REDIS,
    ),
    mutant(
        "entries that were removed are taken for lost",
        "saf/destinations/redis/streams.py",
        'if missing := info["entries-added"] - info["length"]:',
        "if missing := 0:",
        f"{REDIS}::test_what_was_trimmed_is_not_taken_for_lost",
    ),
    mutant(
        "messages of dialogs go to queues",
        "saf/engine/storing.py",
        "capabilities.takes_dialogs:",
        "capabilities.takes_dialogs or True:",
        REDIS,
    ),
    mutant(
        "a sender's header stands for saf's",
        "saf/destinations/mapping.py",
        "taken = {*header.values(), *reserved}",
        "taken = {*reserved}",
        f"{ROUTED}::test_headers_of_the_sender_are_fields_and_what_cannot_be_one_is_a_dead_letter",
    ),
    mutant(
        "beside a whole event, a sender's header stands for saf's",
        "saf/destinations/mapping.py",
        '        taken.update(names("saf", prefix).values())\n',
        "        taken = {*reserved}\n",
        "unit/test_mapping.py::test_headers_that_cannot_be_given_are_rejected",
    ),
    mutant(
        "an event that a sender has made is read in the place of saf's headers",
        "saf/destinations/mapping.py",
        "    if source_of(headers, prefix) is not None:\n",
        "    if False:\n",
        "unit/test_mapping.py::test_an_event_that_a_sender_has_made_is_a_message_like_any_other",
    ),
    mutant(
        "what is nearly JSON is in an event as it is",
        "saf/destinations/mapping.py",
        "from_json(body, allow_inf_nan=False)",
        "from_json(body, allow_inf_nan=True)",
        "unit/test_doctests.py",
    ),
    mutant(
        "what is written to an object store passes through pyarrow's stream",
        f"{DELTA}/files.py",
        "upload = pinned.output(self._store, path)",
        "upload = self._store.open_output_stream(path)",
        f"{OBJECTS}::test_messages_are_rows_and_each_is_there_once",
    ),
    mutant(
        "an object store is waited for as long as its client likes",
        f"{DELTA}/__init__.py",
        '            "retry_timeout": f"{self.bounds.statement_seconds:g}s",\n',
        "",
        f"{OBJECTS}::test_a_store_is_waited_for_within_saf_s_bounds",
    ),
    mutant(
        "a store that lets two commits win passes the check",
        f"{DELTA}/files.py",
        "if max(won) > 1:",
        "if max(won) > AT_ONCE:",
        f"{CHECK}::test_it_finds_what_an_object_store_does_not_keep",
    ),
    mutant(
        "a probe stays where it was written",
        f"{DELTA}/files.py",
        "remaining = files.remove([*paths, *(",
        "remaining = files.remove([*(",
        f"{CHECK}::test_it_tries_an_object_store_and_leaves_nothing_there",
    ),
    mutant(
        "what cannot be deleted is not mentioned",
        f"{DELTA}/files.py",
        "                failed.append(path)\n",
        "                pass\n",
        f"{CHECK}::test_it_finds_what_an_object_store_does_not_keep",
    ),
    mutant(
        "a field that an Avro schema lacks is dropped",
        "saf/destinations/kafka/encoding.py",
        "                if name not in fields:\n",
        "                if False:\n",
        "unit/test_kafka_encoding.py::"
        "test_what_does_not_fit_an_avro_schema_is_rejected_by_its_field",
    ),
    mutant(
        "a body has the id of its schema in the wrong order",
        "saf/destinations/kafka/encoding.py",
        "number.to_bytes(4)",
        'number.to_bytes(4, "little")',
        "unit/test_kafka_encoding.py::test_an_avro_body_is_read_back_with_its_times_and_decimals",
    ),
]
