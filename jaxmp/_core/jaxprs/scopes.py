"""The named scopes that jaxmp leaves in a program: for its own later passes, and for profiles."""

# The conversions that autocast adds.
CAST = "jaxmp_cast"

# The prefix of the reason why a contraction stays float32.
KEPT = "jaxmp_keeps="

# The prefixes of the reason why a policy's recipe does not multiply a contraction: as intended,
# because it is not a layer's or is the last one; or because it cannot.
SKIPPED = "jaxmp_skips="
MISSED = "jaxmp_misses="

# The prefix of the reason why no kernel computes attention, though a policy asks for it.
UNFUSED = "jaxmp_unfused="

# The prefix of a format whose values a product multiplies in a wider one, where hardware lacks it.
EMULATED = "jaxmp_emulates="

# A region with a policy of its own carries this and the policy's string: as the name of a jitted
# function, which survives every transformation, or, for a Flax module inside a wrapped one, as a
# named scope, which needs no lifting.
REGION = "jaxmp:"

# The prefix of the policy, where the region comes from a layer's own `dtype=float32`.
OWN = "own:"

# The prefix of the key of a `PolicyMap` that the region around it comes from, with `|` for `/`.
KEY = "jaxmp_key="

# The prefix around a module that scans layers with policies of their own, followed by its path; and
# around what has such a policy: that, the range of layers and the policy, with `|` between.
LAYERS = "jaxmp_layers="

# Around the division of gradients by the scale of the loss.
UNSCALE = "jaxmp_unscale"

# Around a loss scaler's test that its gradients are finite.
TESTED = "jaxmp_tested"

# Around the initial cotangent of a measured backward pass.
SEED = "jaxmp_seed"

# Around a squeeze that changes nothing, of an array that a wrapped module knows is a parameter.
PARAMETER = "jaxmp_parameter"

# Around the dequantization of a weight: it runs in float32, and its result is a parameter.
DEQUANTIZE = "jaxmp_dequantize"
# Around the dequantization of rows that are looked up in a table, which are not weights.
ROWS = "jaxmp_rows"
EXACTLY = f"{REGION}float32"
