"""The data source ``saf``: a broker's outbox or inbox as a DataFrame.

    saf.spark.register(spark)
    messages = spark.read.format("saf").option("broker", "shop").option("log", "outbox").load()

`saf.spark.table.source` contains the classes that Spark calls for a read, which is planned in one
transaction; a task reads each partition (`part`). `options` and `query` define what a read can ask
for. Writers are in `sink`, streams in `stream`. The forwarder imports none of this.
"""
