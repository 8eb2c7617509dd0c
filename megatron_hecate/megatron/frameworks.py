"""Names in training frameworks and in libraries of theirs that FSSDP relies on.

How to switch FSSDP on in a framework is in docs/frameworks.md.
"""

from __future__ import annotations

# Patches of Megatron's dispatchers that also work over physical experts, as module and method.
# These set ``num_out_tokens`` from the routing map: replayed routes may name an expert twice.
KNOWN_PATCHES = {
    ("verl.utils.megatron.router_replay_patch", "preprocess"),
    ("swift.megatron.utils.router_replay_utils", "preprocess"),
}
METHODS = ("load_weights", "export_weights", "save_weights")
# functions of slime, and of its fork miles, that read and write all weights: for a rollout, for
# copies of policy and reference, and for Hugging Face
NAMED = ("_named_params_and_buffers_global", "_named_params_and_buffers_vanilla")
BRIDGE = "megatron.bridge"
MBRIDGE = "mbridge.core.bridge"
# classes of libraries, by their module, and methods that get a model or a list of its chunks;
# functions of the module itself where the class has no name
LIBRARIES = {
    "slime.backends.megatron_utils.update_weight.common": ("", NAMED),
    "miles.backends.megatron_utils.update_weight.common": ("", NAMED),
    "miles.backends.megatron_utils.rematerialize_utils": ("", ("_named_restore_extras",)),
    f"{BRIDGE}.models.conversion.model_bridge": (
        "MegatronModelBridge",
        (
            "stream_weights_megatron_to_hf",
            "load_weights_hf_to_megatron",
            "stream_weights_hf_to_megatron",
        ),
    ),
    # not in 0.4
    f"{BRIDGE}.models.conversion.quant_bridge": (
        "MegatronQuantizationBridge",
        ("stream_weights_megatron_to_hf_quant",),
    ),
    MBRIDGE: ("Bridge", (*METHODS, "export_weights_without_gather")),
}
# Attributes of the object that replays a router's routes, by its name on the router. An object
# without them is ignored: the layer keeps its forecast. verl's has target_replay_mask, too.
REPLAY_ASSUMPTIONS = {
    "router_replay": {
        "router_replay_action": "an enum; its value is replay_forward before a replayed forward",
        "target_topk_idx": "experts of each token of the next forward, [T, k], or None",
    },
    # slime's and miles'; replayed if ROUTING_REPLAY_STAGE in the environment is replay_forward, or
    # in miles the stage of routing_replay_manager, next to the object's class
    "routing_replay": {
        "top_indices_list": "experts of each token, [T, k], for each forward of a rollout",
        "forward_index": "position of the next forward",
    },
}
