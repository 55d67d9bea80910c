"""The data source ``saf``: a broker's outbox or inbox as a DataFrame.

    saf.spark.register(spark)
    messages = spark.read.format("saf").option("broker", "shop").option("log", "outbox").load()

`saf.spark.table.source` has what Spark calls. It plans a read in one transaction (`snapshot`) and
reads each partition in a task (`part`). What can be asked for is in `options`, `fields` and
`filters`. The forwarder imports nothing of it.
"""
