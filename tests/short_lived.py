"""Sessions of Spark that a test starts for a moment, in processes of their own.

Code that runs once is not worth compiling well: a JVM that does not starts in half of the time.
"""

from __future__ import annotations

from pathlib import Path

SETTINGS = {
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark.ui.enabled": "false",
}


def defaults(folder: Path) -> dict[str, str]:
    """The environment of a program whose sessions have these settings; the folder is for them."""
    folder.mkdir(exist_ok=True)
    lines = [f"{name} {value}\n" for name, value in SETTINGS.items()]
    (folder / "spark-defaults.conf").write_text("".join(lines))
    return {"SPARK_CONF_DIR": str(folder)}
