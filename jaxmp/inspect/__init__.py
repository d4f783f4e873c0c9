"""Tools that show what a policy does and what it costs."""

from jaxmp.inspect.audit import audit
from jaxmp.inspect.report import Finding, Operation, PrecisionError, PrecisionReport

__all__ = ["Finding", "Operation", "PrecisionError", "PrecisionReport", "audit"]
