"""The data source ``saf``: a broker's outbox or inbox as a DataFrame.

    saf.spark.register(spark)
    messages = spark.read.format("saf").option("broker", "shop").option("log", "outbox").load()

`saf.spark.table.source` contains the classes that Spark calls. It plans a read in one transaction
(`snapshot`) and reads each partition in a task (`part`). `options`, `fields` and `filters` define
what a read can ask for. The forwarder imports none of this.
"""
