"""What imports Spark: sessions, their JVM and workers, the runner of tasks, classifiers in SQL.

It needs the extra ``forwarder``. What forwards an item of work is in `saf.engine`, which knows no
Spark.
"""
