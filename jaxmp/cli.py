"""The command line: ``python -m jaxmp audit``, ``preflight``, ``devices``."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmp.devices import describe
from jaxmp.inspect import CompilerMissingError, audit, preflight
from jaxmp.inspect.report import KINDS


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 1 for what ``--fail-on`` found, 2 for a mistake.

    Args:
      argv: the arguments; by default those of the process.

    Example:
      >>> main(["audit", "nowhere:make"])
      2
    """
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except (CompilerMissingError, ValueError, TypeError) as error:
        print(f"jaxmp: {error}", file=sys.stderr)
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxmp", description="Look at precision.")
    commands = parser.add_subparsers(required=True, metavar="command")

    command = commands.add_parser("audit", help="which operation runs in which dtype, and why")
    _add_function(command)
    command.add_argument("--policy", help="audit jaxmp.autocast(fn, policy)")
    command.add_argument("--target", help="the chip to judge for; default: the device here")
    command.add_argument(
        "--fail-on",
        action="append",
        default=[],
        choices=KINDS,
        metavar="KIND",
        help=f"exit with 1 if there is such a finding; one of {', '.join(KINDS)}; repeatable",
    )
    command.set_defaults(run=_audit)

    command = commands.add_parser("preflight", help="memory and traffic on hardware not there")
    _add_function(command)
    command.add_argument("--target", default="tpu-v5e", help="default: %(default)s")
    command.add_argument("--policy", action="append", help="repeatable; default: as written")
    command.add_argument(
        "--donate", type=int, action="append", default=[], help="a positional argument; repeatable"
    )
    command.add_argument(
        "--max-batch", action="store_true", help="find the largest batch that fits"
    )
    command.add_argument(
        "--batch-argnum",
        type=int,
        action="append",
        help="a positional argument that holds the batch; repeatable; default: the last",
    )
    command.add_argument(
        "--fail-on", choices=["does-not-fit"], action="append", default=[], help="exit with 1 if so"
    )
    command.set_defaults(run=_preflight)

    command = commands.add_parser("devices", help="what this machine multiplies natively")
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_devices)
    return parser


def _add_function(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "function", metavar="module:function", help="a function that returns (fn, args)"
    )
    command.add_argument("--json", action="store_true", help="print JSON")


def _audit(args: argparse.Namespace) -> int:
    fn, arguments = _load(args.function)
    report = audit(fn, *arguments, policy=args.policy, target=args.target)
    print(json.dumps(report.to_dict()) if args.json else report)
    return int(any(finding.kind in args.fail_on for finding in report.findings))


def _preflight(args: argparse.Namespace) -> int:
    fn, arguments = _load(args.function)
    report = preflight(
        fn,
        *arguments,
        target=args.target,
        policies=args.policy or (None,),
        donate_argnums=tuple(args.donate),
        max_batch=args.max_batch,
        batch_argnums=args.batch_argnum or -1,
    )
    print(json.dumps(report.to_dict()) if args.json else report)
    failed = any(result.error for result in report.policies)
    too_large = not all(report.fits(result.policy) for result in report.policies)
    return int(failed or (too_large and bool(args.fail_on)))


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
        known = f"{device.chip}{memory}; TFLOP/s: {rates}" if device.chip else "not in the tables"
        print(f"{i}: {device.kind} ({device.platform}): {known}")
    return 0


def _load(spec: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and arguments that ``module:function`` returns."""
    name, _, attribute = spec.partition(":")
    if not name or not attribute:
        raise ValueError(f"write module:function, a function that returns (fn, args); got {spec!r}")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109 (sys.path holds strings)
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot find {spec!r}: {error}") from error
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise TypeError(
            f"{spec} must return (fn, args), a function and a tuple of its arguments; got "
            f"{type(made).__name__!r}"
        )
    fn, arguments = made
    return fn, tuple(arguments)
