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
from typing import Any

import flax
import jax
import jaxlib

from jaxmp import __version__
from jaxmp._audit.audit import audit
from jaxmp._audit.findings import FAULTS, KINDS, OVERRULED
from jaxmp._command_functions import TAKES, attribute_of, load
from jaxmp._lock.check import check, write
from jaxmp._numerics.validate import validate
from jaxmp._numerics.validate_numerics import with_cpu_sums
from jaxmp._preflight.preflight import CompilerMissingError, preflight
from jaxmp._printable import printable
from jaxmp._speed.pays_table import when_it_pays
from jaxmp.devices import chips, describe

_AUDITS = "what is float32 in a program, what it costs, and which line causes it"
_AUDIT = "python -m jaxmp audit lm_step:small --policy mixed_bfloat16"
_PREFLIGHT = (
    "python -m jaxmp preflight lm_step:base --target gpu-h100 --policy float32 \\\n"
    "      --policy mixed_bfloat16 --donate 0 --donate 1"
)
_VALIDATE = (
    "python -m jaxmp validate validate_lm:make_step --batches validate_lm:batches \\\n"
    "      --policy mixed_bfloat16 --steps 300 --out validate_lm"
)
_DEVICES = "python -m jaxmp devices"
_LOCKS = "what a program computes in which dtype, into a file; or what has changed since"
_LOCK = "python -m jaxmp lock lm_step:small --policy mixed_bfloat16 --out precision.lock"
_UNKNOWN = (
    "no figures for it, only for TPUs and NVIDIA GPUs: name one of those with --target, of audit "
    "and preflight"
)
_MAKE_STEP = "make_step(policy, seed), which returns (state, step) or (state, step, evaluate)"


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

    command = _add(commands, "audit", _AUDITS, _AUDIT)
    _add_function(command)
    command.add_argument(
        "--policy", help="audit jaxmp.autocast(fn, policy); exit with 1 if it decides nothing"
    )
    command.add_argument(
        "--target", help=f"the chip to audit for; default: the device here; {_chips()}"
    )
    command.add_argument(
        "--fail-on",
        action="append",
        default=[],
        choices=KINDS,
        metavar="KIND",
        help=f"exit with 1 if there is such a finding; one of {', '.join(FAULTS)}; also "
        f"{', '.join(KINDS.keys() - set(FAULTS))}, which is not a fault; repeatable",
    )
    command.add_argument(
        "--all", action="store_true", help="print every finding, however many lines that takes"
    )
    command.set_defaults(run=_audit)

    command = _add(commands, "lock", _LOCKS, _LOCK)
    _add_name(command)
    command.add_argument(
        "--policy",
        help="lock jaxmp.autocast(fn, policy); to compare, the policy of the file is the default",
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("precision.lock"),
        metavar="FILE",
        help="the file; default: %(default)s",
    )
    does = command.add_mutually_exclusive_group()
    does.add_argument(
        "--check", action="store_true", help="compare with the file; exit with 1 if it differs"
    )
    does.add_argument(
        "--update", action="store_true", help="print what has changed, and rewrite the file"
    )
    command.add_argument(
        "--all", action="store_true", help="print every difference, however many lines that takes"
    )
    command.set_defaults(run=_lock)

    command = _add(
        commands,
        "preflight",
        "memory, traffic and estimated time on a TPU or GPU that you do not have",
        _PREFLIGHT,
    )
    _add_function(command, nargs="?")
    command.add_argument(
        "--table",
        action="store_true",
        help="without a function: print for which layers products in 8 bits pay on the target",
    )
    command.add_argument("--target", default="tpu-v5e", help=f"default: %(default)s; {_chips()}")
    command.add_argument(
        "--policy", action="append", help="side by side; repeatable; default: as written"
    )
    command.add_argument(
        "--donate",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="a positional argument, from 0, whose memory the results may take; repeatable",
    )
    command.add_argument(
        "--max-batch", action="store_true", help="find the largest batch that fits"
    )
    command.add_argument(
        "--max-length", action="store_true", help="find the longest sequence that fits"
    )
    command.add_argument(
        "--batch-argnum",
        type=int,
        action="append",
        metavar="N",
        help="a positional argument that holds the batch; repeatable; default: the last",
    )
    command.add_argument(
        "--price",
        type=float,
        metavar="P",
        help="of one chip for an hour: print the estimated cost of 1,000 steps",
    )
    command.add_argument(
        "--fail-on",
        choices=["does-not-fit"],
        action="append",
        default=[],
        help="exit with 1 if a policy needs more memory than there is",
    )
    command.set_defaults(run=_preflight)

    command = _add(commands, "validate", "whether a policy trains as float32 does", _VALIDATE)
    command.add_argument("function", metavar="module:function", help=_MAKE_STEP)
    command.add_argument("--json", action="store_true", help="print JSON, without the runs")
    command.add_argument(
        "--policy",
        nargs="+",
        action="extend",
        required=True,
        metavar="POLICY",
        help="what to compare; repeatable",
    )
    command.add_argument("--steps", type=int, required=True, metavar="N", help="steps of each run")
    command.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="how many seeds; default: %(default)s"
    )
    command.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="a folder for finished runs, from which an interrupted validation resumes, and for "
        "report.json, report.md and, with matplotlib, report.png",
    )
    command.add_argument(
        "--batches",
        metavar="module:function",
        help="batches(seed), an iterable of what step(state, batch) takes; default: the step's "
        "number",
    )
    command.add_argument(
        "--reference",
        default="float32",
        metavar="POLICY",
        help="what to compare with; default: %(default)s",
    )
    command.add_argument(
        "--perturbations",
        type=int,
        default=1,
        metavar="N",
        help="runs per seed that measure the noise; default: %(default)s",
    )
    command.add_argument(
        "--threshold",
        type=float,
        default=0.005,
        help="the largest relative difference in final loss that passes; default: %(default)s",
    )
    command.add_argument(
        "--key",
        help="identifies the program and its data, such as a version of both: finished runs of the "
        "same key are reused; default: the first step as JAX traces it",
    )
    command.add_argument(
        "--strict", action="store_true", help="exit with 1 also if a comparison proves nothing"
    )
    command.set_defaults(run=_validate)

    command = _add(commands, "devices", "what the devices here multiply natively", _DEVICES)
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_devices)
    return parser


def _versions() -> str:
    others = [f"{package.__name__} {package.__version__}" for package in (jax, jaxlib, flax)]
    return ", ".join([f"jaxmp {__version__}", *others, f"Python {platform.python_version()}"])


def _add(commands: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=f"Prints {summary}.",
        epilog=f"example (the programs are in the folder examples/):\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return command


def _chips() -> str:
    return f"one of {', '.join(chips())}, with sizes as in tpu-v5e:4x4 and gpu-h100:8"


def _add_function(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    _add_name(command, nargs)
    command.add_argument("--json", action="store_true", help="print JSON")


def _add_name(command: argparse.ArgumentParser, nargs: str | None = None) -> None:
    what = f"{TAKES}: make() in train.py is train:make"
    command.add_argument("function", metavar="module:function", help=what, nargs=nargs)


def _audit(args: argparse.Namespace) -> int:
    fn, arguments = load(args.function)
    report = audit(fn, args.policy, target=args.target)(*arguments)
    print(json.dumps(report.to_dict()) if args.json else report.to_text(verbose=args.all))
    failed = {OVERRULED, *args.fail_on}  # OVERRULED: the audit is of another policy
    return int(any(finding.kind in failed for finding in report.findings))


def _lock(args: argparse.Namespace) -> int:
    fn, arguments = load(args.function)
    if not (args.check or args.update):
        locked = write(fn, args.out, args.policy)(*arguments)
        print(
            f"{printable(str(args.out))}: {len(locked.operations)} modules. "
            "Commit it, and --check it in CI."
        )
        return 0
    found = check(fn, args.out, args.policy, update=args.update)(*arguments)
    print(found.to_text(verbose=args.all))
    return int(args.check and bool(found.differences))


def _preflight(args: argparse.Namespace) -> int:
    if args.table == bool(args.function):
        raise ValueError(f"preflight takes either --table or module:function, {TAKES}")
    if args.table:
        table = when_it_pays(args.target)
        print(json.dumps(table.to_dict()) if args.json else table)
        return 0
    if not getattr(jax.config, "jax_platforms", None):
        # Nothing runs here. JAX would look for each accelerator that it has a plugin for, and print
        # a traceback for each that is missing.
        jax.config.update("jax_platforms", "cpu")
    fn, arguments = load(args.function)
    with _progress() as progress:
        report = preflight(
            fn,
            args.policy,
            target=args.target,
            donate_argnums=tuple(args.donate),
            max_batch=args.max_batch,
            max_length=args.max_length,
            batch_argnums=args.batch_argnum or -1,
            price_per_hour=args.price,
            progress=progress,
        )(*arguments)
    print(json.dumps(report.to_dict()) if args.json else report)
    failed = any(result.error for result in report.policies)
    too_large = not all(report.fits(result.policy) for result in report.policies)
    return int(failed or (too_large and bool(args.fail_on)))


def _validate(args: argparse.Namespace) -> int:
    # Read when the backend starts, which is not before the user's module is imported.
    if flags := with_cpu_sums(os.environ.get("XLA_FLAGS")):
        os.environ["XLA_FLAGS"] = flags
    make_step = attribute_of(args.function, _MAKE_STEP)
    report = validate(
        make_step,
        args.policy,
        seeds=args.seeds,
        reference=args.reference,
        perturbations=args.perturbations,
        threshold=args.threshold,
        out=args.out,
        key=args.key,
    )(args.steps, args.batches and attribute_of(args.batches, "batches(seed)"))
    (args.out / "report.json").write_text(json.dumps(report.to_dict()), encoding="utf-8")
    (args.out / "report.md").write_text(report.to_markdown(), encoding="utf-8")
    if importlib.util.find_spec("matplotlib"):
        report.plot(args.out / "report.png")
    print(json.dumps(report.to_dict(runs=False)) if args.json else report)
    return int(not report.passed if args.strict else report.failed)


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


def _devices(args: argparse.Namespace) -> int:
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
    if args.json:
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
