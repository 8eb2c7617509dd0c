"""The example's pretraining script with the one line that gives it the flags."""

import pretrain_gpt

import megatron_hecate.enable  # noqa: F401

if __name__ == "__main__":
    pretrain_gpt.main()
