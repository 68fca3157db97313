"""The models that identities are held on, by what they have."""

QWEN3_VL = ["demo", "dense", "one_kv_head", "unordered_taps", "moe_hub"]
UNWINDOWED = [*QWEN3_VL, "qwen2"]
ALL = [*UNWINDOWED, "qwen2_5"]
RECURRENT = ["hybrid", "hybrid_uneven", "hybrid_moe"]
