"""The named scopes that jaxmp leaves in a program: for what reads it later, and for profiles."""

# The conversions that autocast adds.
CAST = "jaxmp_cast"

# Before the reason for which a contraction stays float32.
KEPT = "jaxmp_keeps="

# Before the reason for which a policy's recipe does not multiply a contraction: as it should be,
# because it is not a layer or the last one; or because it cannot.
SKIPPED = "jaxmp_skips="
MISSED = "jaxmp_misses="

# Before the reason for which no kernel computes attention, though a policy asks for it.
UNFUSED = "jaxmp_unfused="

# Before the format whose values a product multiplies in a wider one, where hardware lacks it.
EMULATED = "jaxmp_emulates="

# A region with a policy of its own carries this and the policy's string: as the name of a jitted
# function, which survives every transformation, or, for a Flax module inside a wrapped one, as a
# named scope, which needs no lifting.
REGION = "jaxmp:"

# Before the policy, where it is a layer's own `dtype=float32` that marks the region.
OWN = "own:"

# Around the division of gradients by the scale of the loss.
UNSCALE = "jaxmp_unscale"

# Around the test of what a loss scaler is given.
TESTED = "jaxmp_tested"

# Around the cotangent with which a measured backward pass begins.
SEED = "jaxmp_seed"

# Around a squeeze that changes nothing, of what a wrapped module knows to be a parameter.
PARAMETER = "jaxmp_parameter"

# Around what turns a quantized weight into an array: it runs in float32, and gives a parameter.
DEQUANTIZE = "jaxmp_dequantize"
# Around that, where it is rows of a table that are looked up, which are not weights.
ROWS = "jaxmp_rows"
EXACTLY = f"{REGION}float32"
