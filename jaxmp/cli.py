"""The command line: ``python -m jaxmp audit``, ``lock``, ``preflight`` and so on."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import flax
import jax
import jaxlib

from jaxmp import __version__
from jaxmp._core.printable import printable
from jaxmp._tools.audit.audit import audit
from jaxmp._tools.audit.report import FAULTS, KINDS, OVERRULED
from jaxmp._tools.command_functions import TAKES, add_command, attribute_of, load
from jaxmp._tools.lock.check import check, write
from jaxmp._tools.preflight.preflight import CompilerMissingError, preflight
from jaxmp._tools.speed.pays_table import when_it_pays
from jaxmp._tools.validate.numerics import with_cpu_sums
from jaxmp._tools.validate.validate import validate
from jaxmp.devices import chips, describe

_UNKNOWN = (
    "no figures for it, only for TPUs and GPUs in the table: name one of those with --target, of "
    "audit and preflight"
)
_MAKE_STEP = "make_step(policy, seed), which returns (state, step) or (state, step, evaluate)"
# What the docstrings of commands name in braces: their help.
_TEXTS = {
    "chips": f"one of {', '.join(chips())}, with sizes as in tpu-v5e:4x4 and gpu-h100:8",
    "kinds": f"{', '.join(FAULTS)}; also {', '.join(KINDS.keys() - set(FAULTS))}, which is not a "
    "fault",
    "make_step": _MAKE_STEP,
    "takes": TAKES,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 1 for what ``--fail-on`` found, 2 for a mistake.

    Ctrl-C ends it with 130, and a closed pipe, as of ``| head``, with 141.

    A mistake that jaxmp finds is printed in one line. Errors of the user's code are not caught.

    Args:
      argv: the arguments; by default those of the process.

    Example:
      >>> main(["audit", "nowhere:make"])
      2
    """
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # of `... | head`: nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        kept = "; the same command resumes" if "out" in args else ""
        print(f"\njaxmp: stopped{kept}", file=sys.stderr)
        return 130
    except (CompilerMissingError, RuntimeError, ValueError, TypeError) as error:
        if not _is_refusal(error):
            raise
        print(printable(f"jaxmp: {error}"), file=sys.stderr)
        return 2
    return code


def _list_commands(parser: argparse.ArgumentParser, _: argparse.Namespace) -> int:
    """Prints the help, for a call without a command."""
    parser.print_help(sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxmp",
        description="Shows in which precision a JAX program runs, what it costs on a chip, and "
        "whether it trains as float32 does. The program need not use jaxmp.",
        epilog="`python -m jaxmp COMMAND --help` has a command's options and an example. explain, "
        "diagnose, parity, tune and monitor are functions: "
        "python -c 'import jaxmp; help(jaxmp.explain)'.",
    )
    parser.set_defaults(run=functools.partial(_list_commands, parser))
    parser.add_argument(
        "--version", action="version", version=_versions(), help="of jaxmp, Python, JAX and Flax"
    )
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for function in (_audit, _lock, _preflight, _validate, _devices):
        add_command(commands, function, _TEXTS, ("check_", "update") if function is _lock else ())
    return parser


def _versions() -> str:
    others = [f"{package.__name__} {package.__version__}" for package in (jax, jaxlib, flax)]
    return ", ".join([f"jaxmp {__version__}", *others, f"Python {platform.python_version()}"])


def _audit(
    function: str,
    *,
    json_: bool = False,
    policy: str | None = None,
    target: str | None = None,
    fail_on: list[Annotated[str, KINDS]] | None = None,
    all_: bool = False,
) -> int:
    """Prints what is float32 in a program, what it costs, and which line causes it.

    Args:
      function (module:function): {takes}: make() in train.py is train:make
      json_: print JSON
      policy: audit jaxmp.autocast(fn, policy); exit with 1 if it decides nothing
      target: the chip to audit for; default: the device here; {chips}
      fail_on (KIND): exit with 1 if there is such a finding; one of {kinds}; repeatable
      all_: print every finding, however many lines that takes

    Example:
      python -m jaxmp audit lm_step:small --policy mixed_bfloat16
    """
    fn, arguments = load(function)
    report = audit(fn, policy, target=target)(*arguments)
    print(json.dumps(report.to_dict()) if json_ else report.to_text(verbose=all_))
    failed = {OVERRULED, *(fail_on or ())}  # OVERRULED: the audit is of another policy
    return int(any(finding.kind in failed for finding in report.findings))


def _lock(
    function: str,
    *,
    policy: str | None = None,
    out: Path = Path("precision.lock"),
    check_: bool = False,
    update: bool = False,
    all_: bool = False,
) -> int:
    """Prints what a program computes in which dtype, into a file; or what has changed since.

    Args:
      function (module:function): {takes}: make() in train.py is train:make
      policy: lock jaxmp.autocast(fn, policy); to compare, the policy of the file is the default
      out (FILE): the file; default: %(default)s
      check_: compare with the file; exit with 1 if it differs
      update: print what has changed, and rewrite the file
      all_: print every difference, however many lines that takes

    Example:
      python -m jaxmp lock lm_step:small --policy mixed_bfloat16 --out precision.lock
    """
    fn, arguments = load(function)
    if not (check_ or update):
        locked = write(fn, out, policy)(*arguments)
        print(
            f"{printable(str(out))}: {len(locked.operations)} modules. "
            "Commit it, and --check it in CI."
        )
        return 0
    found = check(fn, out, policy, update=update)(*arguments)
    print(found.to_text(verbose=all_))
    return int(check_ and bool(found.differences))


def _preflight(
    function: str | None = None,
    *,
    json_: bool = False,
    table: bool = False,
    target: str = "tpu-v5e",
    policy: list[str] | None = None,
    donate: list[int] | None = None,
    max_batch: bool = False,
    max_length: bool = False,
    batch_argnum: list[int] | None = None,
    price: float | None = None,
    fail_on: list[Literal["does-not-fit"]] | None = None,
) -> int:
    r"""Prints memory, traffic and estimated time on a TPU or GPU that you do not have.

    Args:
      function (module:function): {takes}: make() in train.py is train:make
      json_: print JSON
      table: without a function: print for which layers products in 8 bits pay on the target
      target: default: %(default)s; {chips}
      policy: side by side; repeatable; default: as written
      donate: a positional argument, from 0, whose memory the results may take; repeatable
      max_batch: find the largest batch that fits
      max_length: find the longest sequence that fits
      batch_argnum: a positional argument that holds the batch; repeatable; default: the last
      price (P): of one chip for an hour: print the estimated cost of 1,000 steps
      fail_on: exit with 1 if a policy needs more memory than there is

    Example:
      python -m jaxmp preflight lm_step:base --target gpu-h100 --policy float32 \
          --policy mixed_bfloat16 --donate 0 --donate 1
    """
    if table == bool(function):
        raise ValueError(f"preflight takes either --table or module:function, {TAKES}")
    if not function:
        pays = when_it_pays(target)
        print(json.dumps(pays.to_dict()) if json_ else pays)
        return 0
    if not getattr(jax.config, "jax_platforms", None):
        # Nothing runs here. JAX would look for each accelerator that it has a plugin for, and print
        # a traceback for each that is missing.
        jax.config.update("jax_platforms", "cpu")
    fn, arguments = load(function)
    with _progress() as progress:
        report = preflight(
            fn,
            policy,
            target=target,
            donate_argnums=tuple(donate or ()),
            max_batch=max_batch,
            max_length=max_length,
            batch_argnums=batch_argnum or -1,
            price_per_hour=price,
            progress=progress,
        )(*arguments)
    print(json.dumps(report.to_dict()) if json_ else report)
    failed = any(result.error for result in report.policies)
    too_large = not all(report.fits(result.policy) for result in report.policies)
    return int(failed or (too_large and bool(fail_on)))


def _validate(
    function: str,
    *,
    json_: bool = False,
    policy: list[str],
    steps: int,
    seeds: int = 3,
    out: Path,
    batches: str | None = None,
    reference: str = "float32",
    perturbations: int = 1,
    threshold: float = 0.005,
    key: str | None = None,
    strict: bool = False,
) -> int:
    r"""Prints whether a policy trains as float32 does.

    Args:
      function (module:function): {make_step}
      json_: print JSON, without the runs
      policy (POLICY): what to compare; repeatable
      steps: steps of each run
      seeds: how many seeds; default: %(default)s
      out (DIR): a folder for finished runs, from which an interrupted validation resumes, and for
        report.json, report.md and, with matplotlib, report.png
      batches (module:function): batches(seed), an iterable of what step(state, batch) takes;
        default: the step's number
      reference (POLICY): what to compare with; default: %(default)s
      perturbations: runs per seed that measure the noise; default: %(default)s
      threshold: the largest relative difference in final loss that passes; default: %(default)s
      key: identifies the program and its data, such as a version of both: finished runs of the same
        key are reused; default: the first step as JAX traces it
      strict: exit with 1 also if a comparison proves nothing

    Example:
      python -m jaxmp validate validate_lm:make_step --batches validate_lm:batches \
          --policy mixed_bfloat16 --steps 300 --out validate_lm
    """
    # Read when the backend starts, which is not before the user's module is imported.
    if flags := with_cpu_sums(os.environ.get("XLA_FLAGS")):
        os.environ["XLA_FLAGS"] = flags
    make_step = attribute_of(function, _MAKE_STEP)
    report = validate(
        make_step,
        policy,
        seeds=seeds,
        reference=reference,
        perturbations=perturbations,
        threshold=threshold,
        out=out,
        key=key,
    )(steps, batches and attribute_of(batches, "batches(seed)"))
    (out / "report.json").write_text(json.dumps(report.to_dict()), encoding="utf-8")
    (out / "report.md").write_text(report.to_markdown(), encoding="utf-8")
    if importlib.util.find_spec("matplotlib"):
        report.plot(out / "report.png")
    print(json.dumps(report.to_dict(runs=False)) if json_ else report)
    return int(not report.passed if strict else report.failed)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yields a function that prints progress on stderr; in a terminal with rich, with a spinner."""

    def line(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    if not (sys.stderr.isatty() and importlib.util.find_spec("rich")):
        yield line
        return
    from rich.console import Console  # noqa: PLC0415 (an extra)

    console = Console(stderr=True)
    with console.status("") as status:

        def spin(text: str) -> None:
            console.print(text, highlight=False, markup=False)
            status.update("")

        yield spin


def _devices(*, json_: bool = False) -> int:
    """Prints what the devices here multiply natively.

    Args:
      json_: print JSON

    Example:
      python -m jaxmp devices
    """
    devices = [describe(device) for device in jax.local_devices()]
    rows = [
        {
            "kind": device.kind,
            "platform": device.platform,
            "chip": device.chip,
            "hbm_bytes": device.hbm_bytes,
            "tflops": device.tflops,
        }
        for device in devices
    ]
    if json_:
        print(json.dumps(rows))
        return 0
    for i, device in enumerate(devices):
        rates = ", ".join(f"{dtype} {rate:g}" for dtype, rate in device.tflops.items())
        memory = f", {device.hbm_bytes / 2**30:.0f} GiB" if device.hbm_bytes else ""
        known = f"{device.chip}{memory}; TFLOP/s: {rates}" if device.chip else _UNKNOWN
        print(f"{i}: {device.kind} ({device.platform}): {known}")
    return 0


def _is_refusal(error: Exception) -> bool:
    """Returns whether jaxmp itself raised an error, with no frame of the user's code or JAX's.

    JAX leaves a note where it removes its own frames from a traceback.
    """
    package = str(Path(__file__).parent) + os.sep
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not getattr(error, "__notes__", ()) and all(
        file.startswith((package, "<")) for file in files
    )
