"""Rows of sounds of a model that sees, too, are what the library makes of the same samples, however long they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from services.encoder.audio_tower import Samples
from services.encoder.sound_tower import OmniTower
from services.encoder.tower import TowerUnusable
from tests.support.models.sounds import sweep
from tests.support.models.tiny_omni import make_omni_model
from tests.support.models.tiny_phi4 import make_phi_model
from tests.support.models.tiny_qwen_audio import WINDOW_S


@pytest.mark.parametrize("kind", ["qwen2.5", "qwen3"])
def test_rows_of_sounds_are_the_librarys(kind: str, tmp_path: Path) -> None:
    model = make_omni_model(tmp_path, kind)
    tower = OmniTower(tmp_path)
    for number, seconds in enumerate((0.1, 0.73, WINDOW_S - 0.01, WINDOW_S)):
        sound = sweep(number, seconds)
        made, expected = tower.encode(Samples(sound.astype("<f4").tobytes())), model.rows_of(sound)
        rows = torch.frombuffer(bytearray(made.rows), dtype=torch.float32).view(-1, made.size)
        own, deep = rows[:, : expected.shape[1]], rows[:, expected.shape[1] :]
        torch.testing.assert_close(own, expected)
        assert own.std() > 0.1, "rows this flat would agree with anything"
        assert not deep.any(), "a sound adds nothing behind the first layers"
        assert (made.count, made.runs) == (len(expected), ((0, len(expected)),))


def test_rows_of_sounds_of_phi_are_the_librarys(tmp_path: Path) -> None:
    """Which projects those of a chat with images by other weights; one longer than its positions is cut in two."""
    model = make_phi_model(tmp_path)
    tower = OmniTower(tmp_path)
    for number, seconds in enumerate((0.1, 0.73, 41.3)):
        sound, made = sweep(number, seconds), list[torch.Tensor]()
        for beside in (False, True):
            found = tower.encode(Samples(sound.astype("<f4").tobytes(), beside))
            made.append(torch.frombuffer(bytearray(found.rows), dtype=torch.float32).view(-1, found.size))
            torch.testing.assert_close(made[-1], model.rows_of_sound(sound, beside_images=beside))
            assert found.runs == ((0, len(made[-1])),)
        assert (made[0] - made[1]).abs().mean() > 0.1, "projections this alike would agree with each other"


def test_what_prepares_sounds_for_another_tower_is_refused_at_start(tmp_path: Path) -> None:
    make_omni_model(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"feature_size": 20}))
    with pytest.raises(TowerUnusable, match=str(tmp_path)):
        OmniTower(tmp_path)
