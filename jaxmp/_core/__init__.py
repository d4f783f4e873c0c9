"""The transformation and what it stands on, from jaxprs up; each folder imports those before it.

These are `chips`, `jaxprs`, `speed`, `quantize`, `plan`, `execute`, `products`, `decide`, `passes`,
and `autocast`.

Six words of the core that JAX does not have:

* *low*: the policy's 16-bit compute dtype, and a value that is kept in it.
* *demand*: what a value is wanted for: by a matmul, by float32 operations, as an index, an angle, …
* *provenance*: where a value comes from, which decides if it may be narrowed next to low ones: it
  is a parameter, a constant, computed from low values, or data.
* *root*: what it is computed from: parameters alone, literals alone, or anything else.
* *origin*: the identity of a low value. A float32 value remembers those it is computed from since
  the last matmul; where it meets one of them again, it is that value's own statistic, and the
  operation a normalization.
* *region*: a part of the program under a policy of its own.
"""
