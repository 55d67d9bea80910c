"""Routing: ways, choices, resolutions, routes, what is explained and replayed."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

MATCHING, ROUTES, CHOICES = (
    "saf/routing/matching.py",
    "saf/routing/routes.py",
    "saf/routing/route_choices.py",
)
SOURCE = "saf/engine/source_session.py"
OF_ROUTES, OF_ROUTERS, OF_MATCHING = (
    "contract/test_routes.py",
    "contract/test_routers.py",
    "unit/test_matching.py",
)
DURABLE = (
    "contract/test_6_durable.py::"
    "test_what_has_to_be_known_before_anything_is_sent_is_durable_whatever_the_default"
)
ZOMBIE = "contract/test_set_aside_once.py::test_a_zombie_neither_chooses_for_a_key_nor_resolves_it"
EXPLAINED = "contract/test_explained.py"
OF_SQL = "spark/test_expressions.py"

LOCAL, OF_LOCAL = "saf/routing/local.py", "contract/test_local_routes.py"
VOUCHED, OF_VOUCHED = (
    "migrations/baseline/local_dialogs.sql",
    "contract/test_local_senders.py",
)

SERVICE, OF_SERVICE = "saf/routing_service.py", "contract/test_routing_service.py"
DIGITS = f"{OF_SERVICE}::test_numbers_in_headers_are_sent_on_to_the_last_digit"

ONE_SIDED = (
    "contract/test_local_dialogs.py"
    "::test_the_doctor_names_a_route_that_dialogs_lack_in_one_direction"
)

MUTANTS: list[Mutant] = [
    mutant(
        "bytes that are sent on are escaped where backslashes are",
        SERVICE,
        "queries.in_arrays(raw, columns(names, rows))",
        "columns(names, rows)",
        "contract/test_unusual_databases.py::"
        "test_what_a_routing_service_sends_on_keeps_its_body[standard_conforming_strings-psycopg]",
    ),
    mutant(
        "a sender makes a circle of routing services longer",
        SERVICE,
        "int(before[:9]) if isinstance(before, Number) and before.isdecimal() else 0",
        "int(before) if isinstance(before, Number) else 0",
        f"{OF_SERVICE}::test_no_sender_makes_a_circle_of_routing_services_longer",
    ),
    mutant(
        "a message is sent on with rounded numbers",
        SERVICE,
        "        headers = message.exact_headers\n        kept =",
        "        headers = message.headers\n        kept =",
        DIGITS,
    ),
    mutant(
        "a dialog is passed on with rounded numbers",
        "saf/dialogs/passing.py",
        "in message.exact_headers.items()",
        "in message.headers.items()",
        DIGITS,
    ),
    mutant(
        "a route becomes local while somebody writes",
        LOCAL,
        "            connection.execute(BE_ALONE)\n",
        "",
        f"{OF_LOCAL}::test_a_sender_that_is_in_the_middle_ends_before_the_route_is_local",
    ),
    mutant(
        "a route becomes local in a transaction that does not see what is sent meanwhile",
        LOCAL,
        "            _sees_what_is_sent(connection)\n",
        "",
        f"{OF_LOCAL}::test_in_a_caller_s_transaction_"
        "a_route_becomes_local_only_if_it_sees_what_is_sent_meanwhile",
    ),
    mutant(
        "a route becomes local whatever the forwarder has left",
        LOCAL,
        "            _overtake_nothing(connection, service)\n",
        "",
        OF_LOCAL,
    ),
    mutant(
        "what is parked is overtaken by local messages",
        LOCAL,
        "AND p.to_service = %(service)s",
        "AND false",
        f"{OF_LOCAL}::test_a_parked_message_is_not_overtaken_either",
    ),
    mutant(
        "a message for a broker is stored by its sender",
        LOCAL,
        "NEW.to_broker IS NULL AND NEW.conversation_id IS NULL",
        "NEW.conversation_id IS NULL",
        f"{OF_LOCAL}::test_messages_for_other_services_and_for_brokers_go_by_the_forwarder",
    ),
    mutant(
        "rules of senders do not hold for local messages",
        LOCAL,
        "OR saf.check_sender(current_user, NEW.from_service, NEW.to_service)",
        "OR true",
        f"{OF_LOCAL}::test_rules_of_senders_hold",
    ),
    mutant(
        "anybody may make triggers that store in the inbox",
        "migrations/baseline/routing.sql",
        "REVOKE ALL ON FUNCTION saf.store_locally FROM PUBLIC;\n",
        "",
        f"{OF_LOCAL}::test_rules_of_senders_hold",
    ),
    mutant(
        "what a sender makes up on a local route is a verified sender",
        VOUCHED,
        "ELSIF NEW.headers ? 'saf-verified-from' THEN",
        "ELSIF false THEN",
        f"{OF_VOUCHED}::test_a_sender_that_is_made_up_is_no_verified_one",
    ),
    mutant(
        "a local route does not say who was checked",
        VOUCHED,
        "WHERE NEW.id > senders_since",
        "WHERE false",
        f"{OF_VOUCHED}::test_under_rules_a_receiver_is_told_who_was_checked",
    ),
    mutant(
        "an old snapshot vouches by rules that are gone",
        VOUCHED,
        "PERFORM FROM saf.broker FOR SHARE;",
        "NULL;",
        f"{OF_VOUCHED}::test_an_old_snapshot_does_not_vouch_by_rules_that_are_gone",
    ),
    mutant(
        "a choice is not durable",
        CHOICES,
        "connection.execute(DURABLY)",
        'connection.execute("SET LOCAL synchronous_commit = off")',
        DURABLE,
    ),
    mutant(
        "a resolution is not durable",
        "saf/routing/resolved.py",
        "connection.execute(DURABLY)",
        'connection.execute("SET LOCAL synchronous_commit = off")',
        DURABLE,
    ),
    mutant(
        "a zombie chooses, resolves and keeps results",
        SOURCE,
        "            lock_cursors(source, self._work.batch)\n            return write(source)",
        "            return write(source)",
        ZOMBIE,
    ),
    mutant(
        "a key keeps a route that is not in force any more",
        CHOICES,
        "if destination not in among[asker]]",
        "if not destination]",
        f"{OF_ROUTES}::test_a_key_whose_route_has_gone_chooses_anew",
    ),
    mutant(
        "keys take no turns",
        CHOICES,
        "among[asker][turns[asker] % len(among[asker])]",
        "among[asker][0 * turns[asker]]",
        f"{OF_ROUTES}::"
        "test_two_matching_routes_share_a_hundred_keys_evenly_and_each_sticks_for_life",
    ),
    mutant(
        "choices are forgotten though messages wait that went by them",
        CHOICES,
        "WHERE {lane} AND b.subject = ''",
        "WHERE {lane} AND false",
        f"{OF_ROUTES}::test_a_choice_is_kept_while_messages_wait_for_its_destination_and_no_longer",
    ),
    mutant(
        "a use that went unnoted does not count",
        CHOICES,
        "max(retention_seconds, 2 * NOTED_SECONDS) + NOTED_SECONDS",
        "max(retention_seconds, 2 * NOTED_SECONDS)",
        f"{OF_ROUTES}::test_a_use_that_went_unnoted_counts",
    ),
    mutant(
        "choices are forgotten though a batch is in hand that was delivered by them",
        CHOICES,
        "(SELECT min(opened_at) FROM saf.cursor WHERE open IS NOT NULL)",
        "(SELECT max(now()) FROM saf.cursor WHERE open IS NOT NULL)",
        f"{OF_ROUTES}::test_a_batch_in_hand_keeps_the_choices_it_was_delivered_by",
    ),
    mutant(
        "choices of open conversations are forgotten",
        CHOICES,
        "AND c.state <> 'closed')",
        "AND c.state = 'none')",
        f"{OF_ROUTES}::test_the_choice_of_a_conversation_that_is_open_is_not_forgotten",
    ),
    mutant(
        "that a choice is used is not noted",
        CHOICES,
        "        connection.execute(USED, _columns(unnoted))\n",
        "        pass\n",
        f"{OF_ROUTES}::test_a_choice_that_is_not_used_is_forgotten_and_one_that_is_stays",
    ),
    mutant(
        "the broker counts more than the service",
        MATCHING,
        "return (service, broker), (service, None), (None, broker), (None, None)",
        "return (service, broker), (None, broker), (service, None), (None, None)",
        OF_MATCHING,
    ),
    mutant(
        "the default destination is a route like others",
        MATCHING,
        "if not (route.fallback and by_destination):",
        "if route:",
        f"{OF_ROUTES}::test_a_topic_goes_to_the_default_destination_only_if_no_route_matches",
    ),
    mutant(
        "a topic's message goes to a destination by its least specific route",
        MATCHING,
        "by_destination.setdefault(route.destination, route)",
        "by_destination[route.destination] = route",
        f"{OF_MATCHING}::test_a_topics_destination_has_the_quality_of_its_most_specific_route",
    ),
    mutant(
        "an expired route counts for a moment longer",
        ROUTES,
        "self.expires_at <= now",
        "self.expires_at < now",
        f"{OF_ROUTES}::test_a_route_is_over_at_the_moment_that_it_names",
    ),
    mutant(
        "a disabled route counts",
        ROUTES,
        "return self.enabled and not self.expired(now)",
        "return not self.expired(now)",
        f"{OF_ROUTES}::test_the_most_specific_route_wins_and_an_expired_one_is_not_used",
    ),
    mutant(
        "a row does not stand in for a route of the file",
        ROUTES,
        "routes += [entry for entry in declared.routes if entry.named not in rows]",
        "routes += [entry for entry in declared.routes if entry.named not in rows or entry]",
        f"{OF_ROUTES}::test_routes_of_the_file_count_like_rows_and_a_row_stands_in_for_one",
    ),
    mutant(
        "a router that forwards redirects",
        ROUTES,
        "if entry.enabled and entry.mode == REDIRECT\n",
        "if entry.enabled\n",
        f"{OF_ROUTERS}::test_to_a_router_that_forwards_messages_go_as_to_any_service",
    ),
    mutant(
        "a disabled router counts",
        ROUTES,
        "if entry.enabled and entry.mode == REDIRECT\n",
        "if entry.mode == REDIRECT\n",
        f"{OF_ROUTERS}::test_a_router_that_is_disabled_or_removed_is_an_ordinary_service",
    ),
    mutant(
        "each batch freezes a version of its own",
        ROUTES,
        "if latest and latest[0][1:] == frozen:",
        "if latest and latest[0][1:] is frozen:",
        f"{OF_ROUTES}::test_routes_are_written_anew_only_if_they_have_changed",
    ),
    mutant(
        "topics are not frozen",
        ROUTES,
        '"topics": frozen[1],',
        '"topics": [],',
        f"{OF_ROUTES}::test_a_topic_goes_to_every_destination_and_one_down_delays_only_its_copies",
    ),
    mutant(
        "circles of routers go round",
        "saf/engine/resolving.py",
        "        if service in trail:\n",
        "        if service in trail[:0]:\n",
        f"{OF_ROUTERS}::"
        "test_routers_in_a_row_are_followed_and_a_loop_or_more_than_sixteen_is_refused",
    ),
    mutant(
        "a classifier may name what no route leads to",
        "saf/engine/resolving.py",
        "            (pa.array(lost),",
        "            (pa.array(lost & ~lost),",
        f"{OF_ROUTERS}::"
        "test_a_classifier_that_raises_says_nothing_or_names_an_unknown_service_makes_a_dead_letter",
    ),
    mutant(
        "of a dialog later messages are classified too",
        "saf/engine/resolving.py",
        'pc.greater(rows["sequence"], 1)',
        'pc.greater(rows["sequence"], 1000)',
        "contract/test_routers_of_dialogs.py",
    ),
    mutant(
        "a classifier is asked for a key again",
        "saf/engine/resolving.py",
        "        asked &= np.array([name not in known for name in names])[indices]\n",
        "",
        f"{OF_ROUTERS}::"
        "test_a_router_classifies_the_first_message_of_a_key_and_later_ones_bypass_it",
    ),
    mutant(
        "what an expression has raised is not found out",
        "saf/spark/evaluation.py",
        "        explain(self.spark, self.item, raised)\n",
        "        explain(self.spark, self.item, [])\n",
        f"{OF_SQL}::test_the_dead_letter_says_what_its_expression_has_raised",
    ),
    mutant(
        "an expression that Spark fails with fails the job again",
        "saf/spark/evaluation.py",
        "return found or bool(problems)",
        "return found",
        f"{OF_SQL}::test_an_expression_that_spark_dies_of_parks_its_messages_and_holds_up_nobody",
    ),
    mutant(
        "what waits for a router is explained as lost",
        "saf/routing/explain.py",
        "return not self.router and not self.destinations",
        "return not self.destinations",
        f"{EXPLAINED}::test_a_routers_message_is_not_lost_and_one_without_a_route_is",
    ),
    mutant(
        "a key's choice is not explained",
        "saf/routing/explain.py",
        "    elif choice == entry.route.destination:",
        "    elif choice != entry.route.destination:",
        f"{EXPLAINED}::test_of_routes_that_share_a_key_takes_the_one_that_it_has_chosen",
    ),
    mutant(
        "a route for another broker is explained as taken",
        "saf/routing/explain.py",
        "if entry.route.broker not in (None, broker):",
        "if entry.route.broker not in (None, broker) and broker:",
        f"{EXPLAINED}::test_why_a_route_is_not_taken_is_said",
    ),
    mutant(
        "why a route is out of force is not said",
        "saf/routing/explain.py",
        "why = _out_of_force(entry, current) or _elsewhere(",
        "why = _elsewhere(",
        f"{EXPLAINED}::test_why_a_route_is_not_taken_is_said",
    ),
    mutant(
        "what is replayed comes in any order",
        "saf/operating/repair/replay.py",
        "row_number() OVER (ORDER BY o.id)",
        "row_number() OVER (ORDER BY o.id DESC)",
        "contract/test_replay.py::"
        "test_what_a_restored_store_lost_arrives_before_what_was_sent_since",
    ),
    mutant(
        "what a router led to a topic is replayed under the router's name",
        "saf/operating/repair/replay.py",
        "{'lost' if c in ADDRESS else 'o'}",
        "{'o' if c in ADDRESS else 'o'}",
        "contract/test_set_back_topics.py::"
        "test_what_a_router_led_to_a_topic_is_sent_again_under_the_topics_name",
    ),
    mutant(
        "a dry run of a replay lets keys choose",
        "saf/operating/repair/replay.py",
        "connection.transaction(force_rollback=dry_run)",
        "connection.transaction()",
        "contract/test_replay.py::test_a_dry_run_of_a_replay_changes_nothing",
    ),
    mutant(
        "the doctor overlooks dialogs with a local route in one direction",
        "saf/operating/doctor/messages.py",
        "            if in_force.match(other, here) is None:",
        "            if False:",
        ONE_SIDED,
    ),
    mutant(
        "the doctor reports dialogs that the forwarder carries in one direction",
        "saf/operating/doctor/messages.py",
        "            if in_force.match(other, here) is None:",
        "            if True:",
        ONE_SIDED,
    ),
    mutant(
        "the doctor names a local route that messages still wait for",
        "saf/operating/doctor/messages.py",
        "    if not patient.ask(LEFT, service=service)[0][0]:",
        "    if True:",
        ONE_SIDED,
    ),
]
