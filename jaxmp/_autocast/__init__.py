"""The transformation: `autocast`, the marks `full_precision` and `reduced_precision`, `explain`.

The words of this package:

* *ours*: a float32 array of the program, which is ours to narrow. Everything else (integers, an
  author's bfloat16, complex numbers, references) runs as written.
* *low*: the policy's 16-bit compute dtype, and a value that is kept in it.
* *kept*: each of our values is kept in one dtype, float32 or low; equations that want it in the
  other read a copy.
* *demand*: what a value is wanted for: by a contraction, by float32 operations, as an index, an
  angle, … (`demand`).
* *licence*: what allows a float32 value to be narrowed beside low ones: it is a constant, a
  parameter, computed from low values. Data has none (`licences`).
* *wins*: a float32 value without a licence wins over low ones: the operation runs in float32.
* *origin*: the identity of a low value. A float32 value remembers those it derives from since the
  last contraction; where it meets one of them again, it is that value's own statistic, and the
  operation a normalization.
* *pinned*: contractions of the value stay float32, and it says why.
* *made*: made from literals of the program alone (`literals`).
* *carry*, *summed*, *layered*: what an iteration hands to the next; whether that comes back as
  itself plus something; whether through weights of the iteration's own (`carries`).
* *frame*: what is known while a jaxpr is planned (`frame`).
* *step*, *plan*: what to do with one equation, and with a jaxpr (`plan`).
* *pass*: from a plan to another (`passes`).
* *region*: a part of the program under a policy of its own (`marks`).
"""

from jaxmp._autocast.explain import Explanation, explain
from jaxmp._autocast.regions import full_precision, reduced_precision
from jaxmp._autocast.transform import autocast

__all__ = ["Explanation", "autocast", "explain", "full_precision", "reduced_precision"]
