"""The runs of the fault tests as seen from inside pytest: for tests that read what a run left, or start one more in this process."""
import contextlib
import io
import shutil
from dataclasses import dataclass
from pathlib import Path

import mmgrpo.trainer as trainer
import pytest
from faults import PAUSE, config
from mmgrpo.config import RLConfig, make_config


@dataclass(frozen=True)
class Made:
    "Where the model and the cache lie, and three runs: paused after `PAUSE` updates, ended, and paused with another learning rate."
    folder:Path
    paused:Path
    done:Path
    other:Path

    def config(self, run, sections=()) -> RLConfig: return make_config(config(self.folder, Path(run), sections))
    def copy(self, name, place) -> Path: return Path(shutil.copytree(getattr(self, name), Path(place)/'run', symlinks=True))


@pytest.fixture(scope='module')
def made(trials, straight, paused, tmp_path_factory) -> Made:
    other = tmp_path_factory.mktemp('other')/'run'
    trials.ended(other, dict(optimizer=dict(lr=.02)), stop=PAUSE)
    return Made(trials.folder, paused, straight.run, other)


def train(cfg, **kwargs) -> list[str]:
    "Train in this process; the lines that it wrote."
    with contextlib.redirect_stdout(io.StringIO()) as out: trainer.train(cfg, **kwargs)
    return out.getvalue().splitlines()
