"""Tools that show what a policy does and what it costs."""

from jaxmp.inspect.audit import audit
from jaxmp.inspect.chip import chip_names
from jaxmp.inspect.preflight import CompilerMissingError, preflight
from jaxmp.inspect.preflight_report import Preflight, PreflightReport
from jaxmp.inspect.report import Finding, Operation, PrecisionError, PrecisionReport

__all__ = [
    "CompilerMissingError",
    "Finding",
    "Operation",
    "PrecisionError",
    "PrecisionReport",
    "Preflight",
    "PreflightReport",
    "audit",
    "chip_names",
    "preflight",
]
