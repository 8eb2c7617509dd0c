"""What becomes of a record when its model goes. Oracle: the threads of this process, and the folder."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron_hecate.record import job_metrics, recorder
from megatron_hecate.record.run_folder import RunInfo, read

pytestmark = pytest.mark.fast


def test_a_model_that_has_gone_leaves_a_whole_record_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """As where post-training builds one model after another in a process, each in a folder of its own."""
    monkeypatch.setattr(recorder, "place_of_rank", lambda group: (0, True))
    monkeypatch.setattr(job_metrics, "logging_pipeline", lambda: [0])
    monkeypatch.setattr(job_metrics, "_get_default_store", dist.HashStore)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0])
    info = RunInfo(mode="observe", layers=("layer 1",), num_experts=2, ranks=1, node=(0,))
    for iteration in (1, 2):
        before = set(threading.enumerate())
        folder = str(tmp_path / f"model-{iteration}")
        stage = recorder.StageRecorder(info, folder, group=None, experts=[2], collect=lambda: True)
        stage.take(iteration, lambda load=(iteration, 0): {"load": np.array([load])})
        started = set(threading.enumerate()) - before
        assert len(started) == 2  # a writer, and what takes metrics to loggers
        del stage
        for thread in started:
            thread.join(10)
            assert not thread.is_alive()
        record = read(folder)
        assert record.iteration.tolist() == [iteration] and record.load.tolist() == [
            [[iteration, 0]]
        ]
    assert not capsys.readouterr().err
