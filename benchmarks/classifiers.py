"""What classifiers cost: a drain of messages for a router, of each kind, and for no router.

And what a transform costs that changes the body of each message.

Each looks at the origin of a flight in a JSON body of 200 bytes and names one of three services.
All lead to the same store, so that nothing but the classifying differs.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import saf
from benchmarks.drain import forward
from benchmarks.stage import Stage, execute
from saf.config import Transform, load
from saf.routing.routers import add_router, remove_router

MESSAGES = 300_000
ROUNDS = 3
WARM_UP = 1

FILL = f"""
INSERT INTO saf.outbox (to_service, key, message_type, headers, body)
SELECT 'departures', 'aircraft ' || i % 5000, 'Departed',
       '{{"content-type": "application/json"}}',
       convert_to('{{"number":' || i || ',"origin":"' || (ARRAY['EWR', 'JFK', 'LGA'])[1 + i % 3]
                  || '","note":"' || repeat('x', 150) || '"}}', 'UTF8')
FROM generate_series(1, {MESSAGES}) AS i
"""
SQL = "get_json_object(text, '$.origin')"


def by_arrow(messages: pa.RecordBatch) -> pa.Array:
    found = pc.extract_regex(messages["body"].cast(pa.string()), '"origin":"(?P<origin>[A-Z]*)"')
    return found.field("origin")


def by_python(message: saf.Received) -> str:
    return str(message.json()["origin"])


def masked(messages: DataFrame) -> DataFrame:
    text = f.regexp_replace("text", '"number":[0-9]+', '"number":0')
    return messages.select("id", text.alias("body"))


CLASSIFIERS = {
    "none": "",
    "transform": f"{__name__}:masked",
    "sql": SQL,
    "arrow": f"{__name__}:by_arrow",
    "python": f"{__name__}:by_python",
}


def run(stage: Stage, spark: SparkSession) -> None:
    """Notes classifier_sql_ratio and so on, of the messages a second without a classifier."""
    settings = load(stage.settings_file(Path(stage.server.data_dir).parent / "classifiers.toml"))
    execute(stage.app, "TRUNCATE saf.outbox", FILL, "VACUUM ANALYZE saf.outbox")
    seconds: dict[str, list[float]] = {kind: [] for kind in CLASSIFIERS}
    kinds = list(CLASSIFIERS)
    for number in range(WARM_UP + ROUNDS):
        for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
            stage.rewind()
            with stage.app.connect(role="bench", autocommit=True) as connection:
                if kind == "transform":
                    table = Transform(service="departures", function=CLASSIFIERS[kind])
                    with_one = settings.model_copy(update={"transforms": (table,)})
                    seconds[kind].append(forward(spark, with_one, MESSAGES))
                    continue
                if kind != "none":
                    add_router(connection, "departures", kind, CLASSIFIERS[kind])
                seconds[kind].append(forward(spark, settings, MESSAGES))
                if kind != "none":
                    remove_router(connection, "departures")
            if stage.stored() != MESSAGES:
                raise RuntimeError(f"stored {stage.stored()} messages with {kind}")
    execute(stage.app, "TRUNCATE saf.outbox")
    for kind in kinds[1:]:
        pairs = zip(seconds["none"][WARM_UP:], seconds[kind][WARM_UP:], strict=True)
        ratios = [none / with_one for none, with_one in pairs]
        if kind == "transform":
            stage.note("transform_ratio", ratios, "of no transform", ">= 0.75")
            continue
        reach = "" if kind == "python" else ">= 0.85"
        stage.note(f"classifier_{kind}_ratio", ratios, "of no classifier", reach)
