"""What is known of each public model: what stays float32, and how exact the rest is."""

from __future__ import annotations

# Run by default; the others behind `-m slow`. One of each kind of structure: a recurrence, batch
# statistics, a rule of its own, routing, a configured dtype, rigid frames, a library.
REPRESENTATIVE = frozenset(
    {
        "configured_lm",
        "mixture_of_experts",
        "nnx_cnn",
        "ppo",
    }
)

# Of these, those for which float32 is seen to be the identity by default.
QUICK = frozenset({"mixture_of_experts", "nnx_cnn"})

# Contractions of the forward program that stay float32 though their operands are ours, and why:
# model -> {why: how many}. All others multiply in the compute dtype, but for those that the author
# wants exact (precision=HIGHEST) and complex ones. The sizes are those of models made small: heads
# of 4, ranks of 2 and inputs of 3 features are layers that look like geometry here.
FLOAT32: dict[str, dict[str, int]] = {
    "alphafold": {
        "rotates points into a frame or out of it": 12,
        "composes two rotations": 2,
        "moves a frame by a local translation": 2,
    },
    "configured_lm": {"the mean loss is a product with the weights of the tokens": 1},
    "ctc_speech": {"optax multiplies a vector of probabilities by a one-hot one": 1},
    "egnn": {"the charge is one feature": 1},
    "flash_attention": {"the blocks have 4 keys": 2},
    "force_field": {
        "couples harmonics by a constant tensor, contracts 3 components, or sums nothing": 14,
    },
    "hash_grid_nerf": {"turns a ray by the camera's pose": 1},
    "jaxopt_bilevel": {"the inner problem is of no parameter, and has 8 features": 4},
    "mamba": {
        "reads a state of 4 elements": 2,
    },
    "mixture_of_experts": {"dispatches to the 2 experts of each token": 3},
    "optimistix_equilibrium": {"Newton's method starts at zero": 1},
    "physics_informed": {
        "a product with the slope of one coordinate sums nothing": 2,
    },
    "t5_decoder": {"looks up relative positions by a constant one-hot tensor": 1},
}

# Those that are float32 in float16 alone: products by one float32 vector, for its range.
FLOAT16 = {"force_field": 1, "jaxopt_bilevel": 2}

# Float32 contractions that only the backward program has: the linear solve of an implicit rule, and
# what derivative rules written by hand multiply.
BACKWARD = {
    "diffrax_ode": 1,  # the adjoint of a derivative of 4 components
    "jaxopt_bilevel": 29,  # conjugate gradients, and what starts from them
    "optimistix_equilibrium": 3,
    "rk4_adjoint": 4,  # the adjoint of each of the four slopes has 4 components
}

# The target is `accuracy.TARGET` × either floor. These models miss it: the worst ratio measured on
# JAX 0.10 and 0.12. Beyond the rounding of operands, autocast returns contractions in 16 bits and
# computes what follows them in 16 bits, as layers with dtype=bfloat16 do; recurrent models apply
# that many times over. The mixture of experts routes one token elsewhere in one batch, and the VQ-
# VAE some vectors to another code. The bounds keep the ratios from growing.
ABOVE_INPUT_FLOOR = {
    "lstm_seq2seq": 3.25,
    "ctc_speech": 1.69,
    "vit": 1.76,  # 1.59 while its class token was data, and the residual stream float32
    "mobilenet_depthwise": 1.52,
    "diffusion_unet": 1.83,
    "clip_towers": 2.23,
    "flash_attention": 1.52,
    "scanned_lm": 1.76,
    "mixture_of_experts": 7.70,
    "mamba": 2.28,  # 0.77 while depthwise taps and products of 2 features were float32
    "realnvp": 2.09,  # 1.69 before products of 3 elements were float32
    "jaxopt_bilevel": 3.96,
    "rk4_adjoint": 1.95,
    "deep_equilibrium": 1.86,
    "bfloat16_inputs": 1.65,
    "gemma": 1.59,
    "t5_decoder": 1.54,
    "egnn": 2.59,
    "vq_vae": 4.38,
}
ABOVE_INPUT_FLOOR_IN_FLOAT16 = {
    "vq_vae": 3.55,  # a vector nearest to another code
    "jaxopt_bilevel": 2.14,
}
ABOVE_CONTRACTION_FLOOR = {
    "lstm_seq2seq": 2.53,
    "ctc_speech": 1.67,
    "clip_towers": 1.62,
    "mixture_of_experts": 6.53,
    "rk4_adjoint": 2.49,
    "deep_equilibrium": 1.63,
    "physics_informed": 1.54,
    "realnvp": 1.60,
    "jaxopt_bilevel": 1.85,
}
