"""`examples/lm_checkpoint.py`: checkpoints that cannot be restored are named, and left alone."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import jaxmp

from support import EXAMPLES

SETTINGS = {"width": 4, "seed": 0}


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("lm_checkpoint")


def start(module, tx=None):
    params = {"w": jnp.arange(4.0)}
    tx = tx or optax.adam(0.1)
    return module.Progress(jaxmp.TrainState.create(apply_fn=None, params=params, tx=tx), [], {})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run of two checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        module = importlib.import_module("lm_checkpoint")
    folder = tmp_path_factory.mktemp("saved") / "run"
    with module.Checkpoints(folder, SETTINGS, resume=False) as checkpoints:
        progress = start(module)
        for _ in range(2):
            progress = progress._replace(losses=[*progress.losses, 1.5], held_out={0: 5.5})
            checkpoints.save(progress)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def restore(module, folder, tx=None):
    with module.Checkpoints(folder, SETTINGS, resume=True) as checkpoints:
        return checkpoints.restore(start(module, tx))


def cut(pattern, length=5):
    def damage(checkpoint: Path):
        files = [p for p in checkpoint.rglob(pattern) if p.is_file()]
        assert files
        for file in files:
            file.write_bytes(file.read_bytes()[:length])

    return damage


DAMAGE = {
    "the curves are cut short": cut("curves/metadata"),
    "the curves are something else": lambda c: (c / "curves" / "metadata").write_text("[]"),
    "the curves are missing": lambda c: shutil.rmtree(c / "curves"),
    "the state's description is cut short": cut("_METADATA"),
    "the arrays are cut short": cut("manifest.ocdbt"),
    "the state is missing": lambda c: shutil.rmtree(c / "state"),
    "all files are empty": cut("*", 0),
}


# Orbax's event loop complains behind its own exception.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_nothing_overwritten(name, module, folder):
    DAMAGE[name](folder / "2")
    before = contents(folder)
    message = r"train_lm.py: the checkpoint .*run/2 is damaged \(\w+: .*move it away to go on from"
    with pytest.raises(SystemExit, match=message):
        restore(module, folder)
    assert contents(folder) == before
    # What the message says helps.
    shutil.rmtree(folder / "2")
    assert restore(module, folder).losses == [1.5]


# Orbax's event loop complains behind its own exception.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_cannot_be_resumed_is_named(module, folder, tmp_path):
    """Another optimizer, other settings, no folder; and a damaged checkpoint that is the last."""
    before = contents(folder)
    with pytest.raises(SystemExit, match=r"another optimizer or model .* loss scaler .*TrainState"):
        restore(module, folder, jaxmp.dynamic_loss_scale(optax.adam(0.1)))
    assert "To add a scaler to `old`" in jaxmp.TrainState.__doc__
    with (
        module.Checkpoints(folder, SETTINGS | {"width": 8}, resume=True) as checkpoints,
        pytest.raises(SystemExit, match=r"started with {'width': 4}, and this one is {'width': 8}"),
    ):
        checkpoints.restore(start(module))
    assert contents(folder) == before
    assert restore(module, folder).held_out == {0: 5.5}
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="file/run is not a folder to keep checkpoints in"):
        module.Checkpoints(tmp_path / "file" / "run", SETTINGS, resume=False)
    shutil.rmtree(folder / "1")
    cut("_METADATA")(folder / "2")
    with pytest.raises(SystemExit, match="move it away to begin again"):
        restore(module, folder)
