"""Why a target is missed, by a part of the figure's name: shown beside the figure where it is missed.

Only what a profile or the code shows stands here. A miss without an entry is printed as not explained.
"""

COLD = "other work has pushed its code and data out of the caches; right after itself it costs a fraction"

REASONS: dict[str, str] = {
    "times as fast as transformers, untraced": (
        "three fifths of its instructions are in the kernels of products, attention, activations and the convolution "
        "of the patches, which the peer runs too and whose bits are to be the reference's"
    ),
    "patch embedding as a product": (
        "the product runs at the machine's own speed, and the convolution of this torch is so many times as slow"
    ),
    "empty trace": COLD,
    "read again, first after computing": f"1 us of it is the clock's; {COLD}",
    "read of the next location": COLD,
    "one read": f"{COLD}; and a value that is kept costs the allocator, as a hook's does",
    "one assignment": "it is a read that also checks and replaces, and misses with it",
    "layer x position sweep": ("each cell computes all rows of the blocks above its own, one variant at a time"),
    "layer sweep over a recording": "the recording is on the clock, and is a whole forward of its own",
}
