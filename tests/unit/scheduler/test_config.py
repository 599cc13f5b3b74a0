"""What a scheduler is set up with, and what it refuses at its start."""

from __future__ import annotations

import pytest

from services.scheduler.config import SchedulerConfig
from shared.config import ConfigError, load_config


def test_a_scheduler_is_its_engine() -> None:
    config = load_config("scheduler", SchedulerConfig, ["--instance=engine-1", "--policy=priority"], {})
    assert (config.engine_id(), config.limits().policy) == ("engine-1", "priority")
    with pytest.raises(ConfigError, match="must be the instance name"):
        load_config("scheduler", SchedulerConfig, ["--instance=engine-1", "--engine=engine-2"], {})


def test_limits_that_contradict_each_other_stop_the_start() -> None:
    with pytest.raises(ConfigError, match=r"max_batch_tokens \(8\) must be at least max_running \(256\)"):
        load_config("scheduler", SchedulerConfig, ["--max-batch-tokens=8"], {})
