"""Checkpoints of `train_lm.py`: the train state, and what the report at the end needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import orbax.checkpoint as ocp


class Progress(NamedTuple):
    """A run so far."""

    state: Any
    losses: list[float]
    held_out: dict[int, float]


class Checkpoints:
    """The last two checkpoints of a run, in a folder; with no folder, nothing is kept.

    A process that is killed while it saves leaves the previous one, which is then restored.

    Raises:
      SystemExit: If the folder holds a run that is not to be resumed, one of other settings or of
        another optimizer, or a checkpoint that cannot be read.
    """

    def __init__(self, folder: Path | None, settings: dict[str, Any], *, resume: bool) -> None:
        self.settings = settings
        self.manager = None
        if folder is not None:
            options = ocp.CheckpointManagerOptions(max_to_keep=2)
            try:
                self.manager = ocp.CheckpointManager(folder.absolute(), options=options)
            except OSError as error:
                raise SystemExit(
                    f"train_lm.py: {folder} is not a folder to keep checkpoints in "
                    f"({error.strerror})"
                ) from error
            if self.manager.latest_step() is not None and not resume:
                raise SystemExit(f"train_lm.py: {folder} holds a run; --resume continues it")

    def restore(self, start: Progress) -> Progress:
        """The last checkpoint, or `start` where there is none."""
        if self.manager is None or (step := self.manager.latest_step()) is None:
            return start
        # The settings first: another size has a state of other shapes.
        curves = self._read(step, "curves", ocp.args.JsonRestore())
        try:
            settings, losses = curves["settings"], [*curves["losses"]]
            held_out = {int(step): loss for step, loss in curves["held_out"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self._damaged(step, error) from error
        if settings != self.settings:
            ours = {name: x for name, x in self.settings.items() if settings.get(name) != x}
            then = {name: settings.get(name) for name in ours}
            raise SystemExit(
                f"train_lm.py: the run in {self.manager.directory} was started with {then}, and "
                f"this one is {ours}; nothing was changed"
            )
        shapes = jax.eval_shape(lambda: start.state)
        state = self._read(step, "state", ocp.args.StandardRestore(shapes))
        return Progress(state, losses, held_out)

    def _read(self, step: int, part: str, how: Any) -> Any:
        """A part of a checkpoint; what cannot be read is left as it is."""
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**{part: how}))[part]
        except (KeyError, OSError, TypeError, ValueError) as error:
            if "tructure" not in str(error):
                raise self._damaged(step, error) from error
            raise SystemExit(
                f"train_lm.py: the state in {self.manager.directory / str(step)} is of another "
                "optimizer or model than this program's. If a loss scaler or float32 masters were "
                "added since: restore it into a state of the old optimizer, and put the parts "
                f"together as the documentation of jaxmp.TrainState shows. Nothing was changed.\n"
                f"{error}"
            ) from error

    def _damaged(self, step: int, error: Exception) -> SystemExit:
        reason = (str(error) or "?").splitlines()[0][:200]
        others = [other for other in self.manager.all_steps() if other != step]
        instead = f"go on from step {max(others)}" if others else "begin again"
        return SystemExit(
            f"train_lm.py: the checkpoint {self.manager.directory / str(step)} is damaged "
            f"({type(error).__name__}: {reason}). Nothing was changed; move it away to "
            f"{instead}"
        )

    def save(self, progress: Progress) -> None:
        """Saves in the background; the values are copied before it returns."""
        if self.manager is not None:
            curves = {"losses": [*progress.losses], "held_out": {**progress.held_out}}
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(progress.state),
                curves=ocp.args.JsonSave(curves | {"settings": self.settings}),
            )
            self.manager.save(len(progress.losses), args=args)

    def finish(self) -> None:
        """Waits until the last one is written."""
        if self.manager is not None:
            self.manager.wait_until_finished()

    @property
    def how_to_go_on(self) -> str:
        return (
            "nothing is kept without --checkpoint"
            if self.manager is None
            else "--resume continues it"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.manager is not None:
            self.manager.close()
