"""A script with Megatron's arguments and `get_model`, and a setup of its own: none of `pretrain`, none of its callees.

It passes unknown arguments over, as such scripts do. ``OWN_SETUP`` names what it does once its arguments are parsed:
``get_model``, ``optimizer`` (one of torch's, over a model that nothing wraps) or ``nothing``.
"""

import os

from megatron.core.enums import ModelType
from megatron.training import get_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.training import get_model  # by name, before anybody could wrap it

if os.environ.get("OWN_SETUP_ENABLES"):
    import megatron_hecate.enable  # noqa: F401

import torch
from cpu_spec import for_cpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.initialize import initialize_megatron


def build(pre_process: bool = True, post_process: bool = True, **_: object) -> GPTModel:
    config = core_transformer_config_from_args(get_args())
    spec = for_cpu(
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    )
    where = dict(pre_process=pre_process, post_process=post_process, position_embedding_type="rope")
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=64, **where)


def main() -> None:
    parse_and_validate_args(ignore_unknown_args=True)
    initialize_megatron()
    does = os.environ["OWN_SETUP"]
    if does == "get_model":
        model = get_model(build, ModelType.encoder_or_decoder)
    elif does == "optimizer":
        model = [build()]
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        optimizer.step()
        print("it has stepped")
    else:
        model = []
    kinds = {type(part).__name__ for chunk in model for part in chunk.modules()}
    print("own setup:", sorted(kind for kind in kinds if kind.endswith("MoELayer")), flush=True)


if __name__ == "__main__":
    main()
