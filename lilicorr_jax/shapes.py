"""The legend of axes, and the array types written with it.

One letter, one axis, everywhere in this project:

    B  batch rows                               D  width of target and drafter
    T  context positions                        W  width of the reranker
    A  anchors (training blocks) per sequence   E  width of the in and out vectors (d_e)
    P  rows of a verify pass, P = S + 1         F  feed-forward width
    Q  drafter input rows                       N  query heads
    S  drafted slots                            G  key/value heads
    K  candidates per slot                      H  head width
    V  vocabulary                               L  captured target layers

The order is always B A S K ..., features last; `LD` is the product L*D (captured layers side by side).
The paper's *B* is our P: every JAX reader takes B for batch.
"""

from jaxtyping import Array, Bool, Float, Int, Int32, UInt32

__all__ = ["Array", "Bool", "Float", "Int", "Int32", "UInt32"]
