"""What the benchmarks stand on: the same messages, forwarded again and again."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.stage import Stage
from tests.pipeline import forward

pytestmark = pytest.mark.full


@pytest.mark.slow
def test_the_stage_can_be_rewound_as_often_as_a_benchmark_likes(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    stage = Stage(tmp_path)
    try:
        stage.fill(20)
        for _ in range(3):
            stage.rewind()
            assert not [said.error for said in forward(stage.app, mom=stage.mom) if said.error]
            assert stage.stored() == 20
    finally:
        stage.server.stop()
